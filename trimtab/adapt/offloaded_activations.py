"""Selective activation checkpointing whose saved activations are offloaded until the recomputation.

Two dispatch modes for one checkpoint: the first offloads the results of operators to a store, the second returns them
instead of running the operator. Both dispatch below autograd, so that the recomputation still builds the graph that
the backward pass reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

IsSaved = Callable[[Any], bool]
MIN_ELEMENTS = 1 << 16
"""Minimum size of an offloaded tensor; for smaller ones the copies cost more than they save."""


class OffloadedTensor(Protocol):
    """A tensor in an activation store."""

    def get(self) -> torch.Tensor:
        """Returns the tensor on the device."""


class ActivationStore(Protocol):
    """Where activations are offloaded to (`offload.HostStore`)."""

    def offload(self, tensors: Sequence[torch.Tensor]) -> Sequence[OffloadedTensor]:
        """Offloads tensors."""


class _OffloadedResults:
    """The results of one operator call: large tensors in the store, everything else unchanged."""

    def __init__(self, results: Any, store: ActivationStore) -> None:
        self.single, self.kind = isinstance(results, torch.Tensor), type(results)
        self.parts = [results] if self.single else list(results)
        large = [i for i, part in enumerate(self.parts) if _is_large(part)]
        self.offloaded = dict(zip(large, store.offload([self.parts[i] for i in large]), strict=True))
        for i in large:
            self.parts[i] = None

    def fetch(self) -> Any:
        parts = [
            self.offloaded[i].get() if i in self.offloaded else part for i, part in enumerate(self.parts)
        ]
        return parts[0] if self.single else self.kind(parts)


def _is_large(part: Any) -> bool:
    return isinstance(part, torch.Tensor) and part.numel() >= MIN_ELEMENTS


class _OffloadingMode(TorchDispatchMode):
    def __init__(self, is_saved: IsSaved, store: ActivationStore, saved: list[_OffloadedResults]) -> None:
        super().__init__()
        self.is_saved, self.store, self.saved = is_saved, store, saved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if self.is_saved(func):
            self.saved.append(_OffloadedResults(results, self.store))
        return results


class _FetchingMode(TorchDispatchMode):
    def __init__(self, is_saved: IsSaved, saved: list[_OffloadedResults]) -> None:
        super().__init__()
        self.is_saved, self.saved = is_saved, saved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_saved(func):
            return self.saved.pop(0).fetch()
        return func(*args, **(kwargs or {}))


def offloading_contexts(
    is_saved: IsSaved, store: ActivationStore
) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Returns the contexts of forward pass and recomputation, for `torch.utils.checkpoint.checkpoint(context_fn=...)`.

    Args:
        is_saved: whether the results of an operator are saved; called while the operator is dispatched.
        store: where they are offloaded to.

    Example:
        >>> checkpoint(run, x, context_fn=lambda: offloading_contexts(is_saved, store))  # doctest: +SKIP
    """
    saved: list[_OffloadedResults] = []
    return _OffloadingMode(is_saved, store, saved), _FetchingMode(is_saved, saved)
