"""Measured memory in four buckets: weights, gradients, optimizer states, activations; the rest is `other`.

On a GPU the caching allocator counts bytes. The CPU allocator does not, so one step runs under a dispatch mode
that observes every storage being allocated and freed. That gives exact tensor bytes at the cost of one slower step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trimtab.trainer.setup import TrainingSetup


def storage_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Bytes of the distinct storages behind some tensors."""
    seen: dict[int, int] = {}
    for tensor in tensors:
        if tensor is not None:
            storage = tensor.untyped_storage()
            seen[storage.data_ptr() or id(storage)] = storage.nbytes()
    return sum(seen.values())


class LiveBytes(TorchDispatchMode):
    """Counts bytes of storages created inside it that are still alive, and their peak.

    Example:
        >>> with LiveBytes() as live:
        ...     tensor = torch.zeros(1000)
        ...     del tensor
        >>> live.now, live.peak
        (0, 4000)
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = {
            t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._track(tensor.untyped_storage(), inputs)
        return out

    def _track(self, storage: torch.UntypedStorage, inputs: set[int]) -> None:
        key = storage._cdata
        if key in self._known or key in inputs:
            return
        size = storage.nbytes()
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def persistent_bytes(setup: TrainingSetup) -> dict[str, int]:
    """Persistent bytes, which remain allocated between steps, by bucket."""
    return {
        "weights": storage_bytes([*setup.model.parameters(), *setup.model.buffers()]),
        "gradients": storage_bytes(p.grad for p in setup.parameters.values()),
        "optimizer": storage_bytes(setup.optimizer.tensors().values()),
        "activations": 0,
        "other": 0,
    }


class StepMeter:
    """Measures one step: `with StepMeter(setup) as meter:` … `meter.backward_done()` … then `meter.buckets`.

    Gradients must be None when the block begins. The buckets add up to the step's peak: activations are the peak of
    forward and backward minus the gradients, `other` is what the optimizer step needs beyond that peak. Workspaces of
    earlier steps (`TrainingSetup.workspace_bytes`) count as activations, as those that a step allocates.
    """

    def __init__(self, setup: TrainingSetup) -> None:
        self.buckets = persistent_bytes(setup)
        self._setup = setup
        self._cuda = setup.device.type == "cuda"
        self._live = LiveBytes()
        self._base = self._workspaces = 0

    def _peak(self) -> int:
        if self._cuda:
            above = torch.cuda.max_memory_allocated(self._setup.device) - self._base
        else:
            above = self._live.peak
        return above + self._workspaces

    def __enter__(self) -> StepMeter:
        self._workspaces = self._setup.workspace_bytes()
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self._setup.device)
            self._base = torch.cuda.memory_allocated(self._setup.device)
        else:
            self._live.__enter__()
        return self

    def backward_done(self) -> None:
        """Called between backward and optimizer step, while the gradients are allocated."""
        gradients = storage_bytes(p.grad for p in self._setup.parameters.values())
        self.buckets["gradients"] = gradients
        self.buckets["activations"] = max(0, self._peak() - gradients)

    def __exit__(self, *exc: Any) -> None:
        if not self._cuda:
            self._live.__exit__(*exc)
        above = self.buckets["gradients"] + self.buckets["activations"]
        self.buckets["other"] = max(0, self._peak() - above)


def process_bytes() -> int:
    """Resident memory of this process now, or 0 if it cannot be read."""
    try:
        import psutil
    except ImportError:
        return 0
    return int(psutil.Process().memory_info().rss)


def process_memory(device: torch.device) -> dict[str, int | None]:
    """Memory of this process as fields of `measured.Measured`, read without device synchronization."""
    host = process_bytes() or None
    if device.type != "cuda":
        return {"process": host, "host": host}
    return {
        "highest": int(torch.cuda.max_memory_allocated(device)),
        "reserved": int(torch.cuda.max_memory_reserved(device)),
        "host": host,
    }
