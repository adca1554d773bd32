"""Detect non-finite losses and gradients without synchronizing with the device after every step.

The flag stays on the device. Once a step is bad, that step and all after it leave weights and optimizer states
unchanged. When the host next reads the flag, the state is still the one before the bad step: it can be saved,
and the bad step can be rerun with hooks on every module.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from trimtab.trainer.setup import TrainingSetup
from trimtab.trainer.step import accumulate


class FiniteGuard:
    """Records, on the device, the first step whose loss or gradient norm was not finite."""

    def __init__(self, device: torch.device) -> None:
        self._first_bad = torch.full((), -1, dtype=torch.int64, device=device)

    def observe(self, step: int, loss: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        """Returns a bool on the device: whether to skip the optimizer step."""
        bad = ~(torch.isfinite(loss) & torch.isfinite(norm))
        self._first_bad = torch.where(bad & (self._first_bad < 0), step, self._first_bad)
        return self._first_bad >= 0

    def first_bad(self) -> int | None:
        """Reads the flag: the first bad step (from 0), or None. Synchronizes with the device."""
        step = int(self._first_bad)
        return None if step < 0 else step


def locate_non_finite(
    setup: TrainingSetup, microbatches: Sequence[Any], num_targets: int, step: int = 0
) -> str | None:
    """Reruns a bad step with hooks on every module; reports the batch, its documents and the first bad layer.

    None if every microbatch is finite by itself. On a mesh each process checks its own microbatches, and all
    processes report what the first one with a finding reports.
    """
    return setup.mesh.first_text(_locate_here(setup, microbatches, num_targets, step))


def _locate_here(
    setup: TrainingSetup, microbatches: Sequence[Any], num_targets: int, step: int
) -> str | None:
    for index, batch in enumerate(microbatches):
        paused = nullcontext() if setup.in_backward is None else setup.in_backward.paused()
        plain = nullcontext() if setup.compiled is None else setup.compiled.paused()
        with NonFiniteHooks(setup.model, getattr(batch, "documents_BT", None)) as watch, paused, plain:
            loss = accumulate(setup, [batch], num_targets, 1.0, step=step, first=index, eager=True)
        bad_gradients = [n for n, p in setup.parameters.items() if _has_bad(p.grad)]
        for parameter in setup.parameters.values():
            parameter.grad = None
        if watch.first is None and torch.isfinite(loss) and not bad_gradients:
            continue
        documents = bad_documents(batch.origins, watch.documents)
        shown = ", ".join(documents[:4]) + (f" and {len(documents) - 4} more" if len(documents) > 4 else "")
        if watch.first is not None:
            where = f"first in the output of {watch.first}"
        elif not torch.isfinite(loss):
            where = "in the loss"
        else:
            where = f"in the gradient of {bad_gradients[0]} ({len(bad_gradients)} parameters)"
        return f"{where}, microbatch {index + 1} of {len(microbatches)} (documents: {shown})"
    return None


def _has_bad(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and not bool(torch.isfinite(tensor).all())


def bad_documents(origins: Sequence[Sequence[str]], indices: Sequence[Sequence[int]] | None) -> list[str]:
    """Origins of the documents with these indices in each sequence; of all documents if `indices` is None or empty.

    Example:
        >>> bad_documents([["a", "b"], ["c"]], [[1], []])
        ['b']
        >>> bad_documents([["a", "b"], ["c"]], None)
        ['a', 'b', 'c']
    """
    named: list[str] = []
    if indices is not None:
        named = [
            sequence[number] for sequence, numbers in zip(origins, indices, strict=True) for number in numbers
        ]
    return list(dict.fromkeys(named or (origin for sequence in origins for origin in sequence)))


class NonFiniteHooks:
    """Forward hooks that record the first module whose output is not finite, and the documents of its bad tokens.

    Args:
        model: its modules get the hooks.
        documents_BT: the index of each token's document in its sequence, -1 for padding; None if it is unknown.
    """

    def __init__(self, model: torch.nn.Module, documents_BT: torch.Tensor | None = None) -> None:
        self.first: str | None = None
        self.documents: list[list[int]] | None = None
        """Document indices of each sequence; None if the output has no token dimension."""
        self._model, self._documents_BT = model, documents_BT
        self._handles: list[Any] = []

    def __enter__(self) -> NonFiniteHooks:
        for name, module in self._model.named_modules():
            # Innermost first: a module's hook runs before that of the module around it.
            self._handles.append(module.register_forward_hook(self._hook(name)))
        return self

    def _hook(self, name: str) -> Any:
        def check(module: torch.nn.Module, inputs: Any, output: Any) -> None:
            if self.first is None and isinstance(output, torch.Tensor) and _has_bad(output):
                self.first = name or "the model"
                self.documents = self._documents_of(output)

        return check

    def _documents_of(self, output: torch.Tensor) -> list[list[int]] | None:
        documents_BT = self._documents_BT
        if documents_BT is None or output.shape[:2] != documents_BT.shape:
            return None
        bad_BT = ~torch.isfinite(output.detach()).reshape(*documents_BT.shape, -1).all(-1).cpu()
        rows = zip(documents_BT.cpu(), bad_BT, strict=True)
        return [[int(n) for n in documents_T[bad_T].unique() if n >= 0] for documents_T, bad_T in rows]

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()


def non_finite_remedy(setup: TrainingSetup, saved_step: int, *, documents: bool) -> str:
    """The remedy for non-finite values; `documents`: whether the error names some."""
    adapters = any(".lora_" in name for name in setup.parameters)
    look = "check those documents; " if documents else ""
    if saved_step == 0:
        lower = "lower lora.lora_alpha, " if adapters else ""
        return f"{look}{lower}set another dtype, or check the weights: no step was completed yet"
    if adapters:
        way = "`trimtab export peft --checkpoint STEP` writes an adapter that lora.adapter can load"
    else:
        way = "`trimtab export hf --checkpoint STEP` writes a model that model.name can load"
    return (
        f"{look}start a new run with a lower learning_rate or another dtype, from the beginning or from an earlier "
        f"checkpoint: {way}"
    )
