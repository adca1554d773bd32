"""Records the memory of a step: every allocation with its bucket, phase, module and line, on a CPU and on a GPU.

`AllocationRecorder` tracks modules, lines and the backward pass. Its subclass here also numbers the operations and runs
each in a range of torch's profiler, so that allocation events identify the operation of every block, scratch of kernels
included. Compiled regions and CUDA graphs hide their operations: record without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.profiler import record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trimtab.facts.phases import During, RunPhase
from trimtab.facts.tensor_kinds import TensorKind
from trimtab.lab.memory import LABEL, collect_garbage, memory_timeline
from trimtab.lab.memory_attribution import (
    NamedAddress,
    OperationRecord,
    OperationResult,
    attribute,
    persistent_blocks,
)
from trimtab.lab.memory_blocks import AttributedTimeline
from trimtab.lab.memory_roles import Place
from trimtab.run.allocations import AllocationRecorder, innermost_package_line
from trimtab.run.live_tensors import NamedTensor, Origin, States, named_tensors

FINAL_NORM = "model.norm"
"""The last module of a decoder before the loss."""


class MemoryRecorder(AllocationRecorder):
    """Numbers and records the operations of each phase.

    It does not intercept the backward pass, which would keep autograd from accumulating gradients in place: there the
    profiler's ranges identify the allocating node, and autograd's sequence number its forward operation.

    Example:
        >>> recorder = MemoryRecorder(torch.nn.Linear(2, 2))
        >>> with recorder.during(RunPhase.OPTIMIZER_STEP):
        ...     kept = torch.zeros(1000)
        >>> [one.name for one in recorder.operations], recorder.operations[1].place.phase.value
        (['', 'aten::zeros'], 'optimizer step')
    """

    def __init__(self, model: torch.nn.Module, optimizer: States | None = None) -> None:
        super().__init__()
        self.model, self.optimizer = model, optimizer
        self.operations: list[OperationRecord] = []
        self.known: list[NamedAddress] = []
        """Addresses of gradients and optimizer states, in the order in which they were seen."""
        self._phase = RunPhase.OTHER
        self._after_norm = False
        self._weights = {parameter.data_ptr() for parameter in model.parameters()}

    @property
    def forward(self) -> Mapping[int, Origin]:
        """The forward operation of each backward node, by autograd's sequence number."""
        return self._forward

    @contextmanager
    def during(self, phase: RunPhase) -> Iterator[None]:
        """Operations inside belong to `phase`; the loss is recognized inside the forward pass."""
        before, self._phase, self._after_norm = self._phase, phase, False
        self._begin_phase()
        context = nullcontext() if phase is RunPhase.BACKWARD else self
        try:
            with context:
                yield
        finally:
            if phase is RunPhase.BACKWARD:
                self._note(named for named in named_tensors(self.model) if named.kind is TensorKind.GRADIENTS)
            self._phase = before

    @contextmanager
    def tracking_modules(self) -> Iterator[None]:
        """Tracks modules inside; at the end notes optimizer states, some of which may be new."""
        self.watch(self.model)
        try:
            yield
        finally:
            self._followed.close()
        self._note(named_tensors(None, self.optimizer))

    def __exit__(self, *exc: Any) -> None:
        """Ends a phase; modules stay tracked."""
        TorchDispatchMode.__exit__(self, *exc)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        number = len(self.operations)
        self.operations.append(OperationRecord("", Origin(), Place(self._phase)))
        with record_function(f"{LABEL}{number}"):
            out = super().__torch_dispatch__(func, types, args, kwargs)
        name = str(func).partition(".")
        self.operations[number] = OperationRecord(
            f"{name[0]}::{name[2].partition('.')[0]}", self.last_origin, self._place(args), tuple(_made(out))
        )
        return out

    def _place(self, args: Any) -> Place:
        if self.last_origin.module == FINAL_NORM:
            self._after_norm = True
        is_loss = self._phase is RunPhase.FORWARD and self._after_norm and self.last_origin.module is None
        first = args[0] if args else None
        return Place(
            RunPhase.LOSS if is_loss else self._phase,
            self.last_origin.module,
            casts_weight=isinstance(first, torch.Tensor) and first.data_ptr() in self._weights,
        )

    @contextmanager
    def entering(self, name: str) -> Iterator[None]:
        """Tracks a module's call; in the backward pass, where layers are recomputed, in a profiler range."""
        if self._phase is not RunPhase.BACKWARD:
            with super().entering(name):
                yield
            return
        origin = Origin(f"recomputation of {name}", innermost_package_line())
        with self._numbered(OperationRecord("", origin, Place(RunPhase.BACKWARD, name))):
            yield

    def _begin_phase(self) -> None:
        """Records an empty operation, so that releases after it belong to the new phase."""
        with self._numbered(OperationRecord("", Origin(), Place(self._phase))):
            pass

    @contextmanager
    def _numbered(self, record: OperationRecord) -> Iterator[None]:
        number = len(self.operations)
        self.operations.append(record)
        with record_function(f"{LABEL}{number}"):
            yield

    def _note(self, tensors: Iterable[NamedTensor]) -> None:
        for named in tensors:
            address = named.tensor.untyped_storage().data_ptr()
            self.known.append(NamedAddress(address, len(self.operations), named.kind, named.name))


def record_memory(
    run: Callable[[During], object],
    device: str,
    model: torch.nn.Module,
    optimizer: States | None = None,
) -> AttributedTimeline:
    """Runs once and attributes every block of memory.

    Args:
        run: called with a context manager for phases: `with during(RunPhase.FORWARD): …`.
        device: the model's device, cpu or cuda.
        model: for the names of weights, gradients and modules.
        optimizer: for the names of its states.

    Example:
        >>> layer = torch.nn.Linear(256, 256)
        >>> def step(during):
        ...     with during(RunPhase.FORWARD):
        ...         loss = layer(torch.ones(8, 256)).sum()
        ...     with during(RunPhase.BACKWARD):
        ...         loss.backward()
        >>> timeline = record_memory(step, "cpu", layer)
        >>> list(timeline.moments())[-1].by_kind()[TensorKind.GRADIENTS]
        263168
    """
    recorder = MemoryRecorder(model, optimizer)
    collect_garbage(device)
    before = persistent_blocks(model, optimizer, device)

    def recorded() -> object:
        with recorder.tracking_modules():
            return run(recorder.during)

    timeline = memory_timeline(recorded, device)
    return attribute(timeline.events, recorder.operations, recorder.forward, recorder.known, before)


def _made(out: Any) -> Iterator[OperationResult]:
    for index, tensor in enumerate(tree_leaves(out)):
        if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            dtype = str(tensor.dtype).removeprefix("torch.")
            yield OperationResult(
                storage.data_ptr(), storage.nbytes(), index, f"{list(tensor.shape)} {dtype}"
            )
