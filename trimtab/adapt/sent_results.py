"""Selective checkpointing that saves results elsewhere between a layer's forward pass and its recomputation.

Two dispatch modes for one checkpoint: the first sees an operator run and sends what it gives to a store, the second
hands it back instead of running the operator. Both see operators below autograd, so that the second pass builds the
graph that the backward pass reads, around results it did not compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

IsSaved = Callable[[Any], bool]
LEAST = 1 << 16
"""Elements of a tensor that is worth the way: smaller ones stay where they are."""


class Sent(Protocol):
    """A tensor that is elsewhere."""

    def get(self) -> torch.Tensor:
        """It, back again."""


class Store(Protocol):
    """Where tensors can be sent (`offload.HostStore`)."""

    def send(self, tensors: Sequence[torch.Tensor]) -> Sequence[Sent]:
        """Takes tensors away."""


class _Away:
    """What one call of an operator gave: large tensors in the store, everything else as it is."""

    def __init__(self, results: Any, store: Store) -> None:
        self.single, self.kind = isinstance(results, torch.Tensor), type(results)
        self.parts = [results] if self.single else list(results)
        large = [i for i, part in enumerate(self.parts) if _is_large(part)]
        self.sent = dict(zip(large, store.send([self.parts[i] for i in large]), strict=True))
        for i in large:
            self.parts[i] = None

    def back(self) -> Any:
        parts = [self.sent[i].get() if i in self.sent else part for i, part in enumerate(self.parts)]
        return parts[0] if self.single else self.kind(parts)


def _is_large(part: Any) -> bool:
    return isinstance(part, torch.Tensor) and part.numel() >= LEAST


class _Sending(TorchDispatchMode):
    def __init__(self, is_saved: IsSaved, store: Store, away: list[_Away]) -> None:
        super().__init__()
        self.is_saved, self.store, self.away = is_saved, store, away

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if self.is_saved(func):
            self.away.append(_Away(results, self.store))
        return results


class _Returning(TorchDispatchMode):
    def __init__(self, is_saved: IsSaved, away: list[_Away]) -> None:
        super().__init__()
        self.is_saved, self.away = is_saved, away

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_saved(func):
            return self.away.pop(0).back()
        return func(*args, **(kwargs or {}))


def contexts(is_saved: IsSaved, store: Store) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """For `torch.utils.checkpoint.checkpoint(..., context_fn=...)`: the first pass's context and the second's.

    Args:
        is_saved: whether the results of an operator are saved, asked while it is dispatched.
        store: where.

    Example:
        >>> checkpoint(run, x, context_fn=lambda: contexts(is_saved, store))  # doctest: +SKIP
    """
    away: list[_Away] = []
    return _Sending(is_saved, store, away), _Returning(is_saved, away)
