"""Records the memory of a step: every allocation with its bucket, phase, module and line, on a CPU and on a GPU.

An `AllocationRecorder` follows modules, lines and the backward pass. Here it also numbers the operations and runs each
in a range of torch's profiler, whose allocation events then say by address which operation made which block, scratch
of kernels included. Compiled regions and CUDA graphs show none of their operations: record without them.
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
from trimtab.lab.memory import LABEL, memory_timeline
from trimtab.lab.memory_attribution import Known, Made, OperationRecord, attribute, standing_blocks
from trimtab.lab.memory_blocks import AttributedTimeline
from trimtab.lab.memory_roles import Place
from trimtab.run.allocations import AllocationRecorder, line_here
from trimtab.run.live_tensors import NamedTensor, Origin, States, named_tensors

FINAL_NORM = "model.norm"
"""The module of a decoder behind which the loss begins."""


class MemoryRecorder(AllocationRecorder):
    """Numbers the operations of each phase and remembers what each one was.

    In the backward pass nothing is looked at from Python, which would keep autograd from adding gradients in place:
    there the profiler's ranges say which node allocates, and autograd's numbers which forward operation made the node.

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
        self.known: list[Known] = []
        """In order: what gradients and optimizer states were seen to be."""
        self._phase = RunPhase.OTHER
        self._after_norm = False
        self._weights = {one.data_ptr() for one in model.parameters()}

    @property
    def forward(self) -> Mapping[int, Origin]:
        """Where the forward operations were that made the nodes of the backward pass, by autograd's numbers."""
        return self._forward

    @contextmanager
    def during(self, phase: RunPhase) -> Iterator[None]:
        """What happens inside belongs to a phase; the loss is recognized inside of the forward pass."""
        before, self._phase, self._after_norm = self._phase, phase, False
        self._begin_phase()
        looks = nullcontext() if phase is RunPhase.BACKWARD else self
        try:
            with looks:
                yield
        finally:
            if phase is RunPhase.BACKWARD:
                self._note(one for one in named_tensors(self.model) if one.kind is TensorKind.GRADIENTS)
            self._phase = before

    @contextmanager
    def following(self) -> Iterator[None]:
        """Inside, modules are followed; at the end optimizer states are noted, some of which may be new."""
        self.watch(self.model)
        try:
            yield
        finally:
            self._followed.close()
        self._note(named_tensors(None, self.optimizer))

    def __exit__(self, *exc: Any) -> None:
        """Ends a phase; modules are followed on."""
        TorchDispatchMode.__exit__(self, *exc)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        number = len(self.operations)
        self.operations.append(OperationRecord("", Origin(), Place(self._phase)))
        with record_function(f"{LABEL}{number}"):
            out = super().__torch_dispatch__(func, types, args, kwargs)
        name = str(func).partition(".")
        self.operations[number] = OperationRecord(
            f"{name[0]}::{name[2].partition('.')[0]}", self.last, self._place(args), tuple(_made(out))
        )
        return out

    def _place(self, args: Any) -> Place:
        if self.last.module == FINAL_NORM:
            self._after_norm = True
        is_loss = self._phase is RunPhase.FORWARD and self._after_norm and self.last.module is None
        first = args[0] if args else None
        return Place(
            RunPhase.LOSS if is_loss else self._phase,
            self.last.module,
            casts_weight=isinstance(first, torch.Tensor) and first.data_ptr() in self._weights,
        )

    @contextmanager
    def entering(self, name: str) -> Iterator[None]:
        """A module runs inside; in the backward pass, where layers are recomputed, a range of the profiler names it."""
        if self._phase is not RunPhase.BACKWARD:
            with super().entering(name):
                yield
            return
        origin = Origin(f"recomputation of {name}", line_here())
        with self._numbered(OperationRecord("", origin, Place(RunPhase.BACKWARD, name))):
            yield

    def _begin_phase(self) -> None:
        """An operation that does nothing: what is released behind it is of the phase."""
        with self._numbered(OperationRecord("", Origin(), Place(self._phase))):
            pass

    @contextmanager
    def _numbered(self, record: OperationRecord) -> Iterator[None]:
        number = len(self.operations)
        self.operations.append(record)
        with record_function(f"{LABEL}{number}"):
            yield

    def _note(self, tensors: Iterable[NamedTensor]) -> None:
        for one in tensors:
            address = one.tensor.untyped_storage().data_ptr()
            self.known.append(Known(address, len(self.operations), one.kind, one.name))


def record_memory(
    run: Callable[[During], object],
    device: str,
    model: torch.nn.Module,
    optimizer: States | None = None,
) -> AttributedTimeline:
    """Runs once and attributes every block of memory.

    Args:
        run: is called with a function to enter for each phase: `with during(RunPhase.FORWARD): …`.
        device: cpu or cuda, where the model is.
        model: names weights and gradients, and modules.
        optimizer: names its states.

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
    before = standing_blocks(model, optimizer, device)

    def recorded() -> object:
        with recorder.following():
            return run(recorder.during)

    timeline = memory_timeline(recorded, device)
    return attribute(timeline.events, recorder.operations, recorder.forward, recorder.known, before)


def _made(out: Any) -> Iterator[Made]:
    for index, tensor in enumerate(tree_leaves(out)):
        if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
            storage = tensor.untyped_storage()
            dtype = str(tensor.dtype).removeprefix("torch.")
            yield Made(storage.data_ptr(), storage.nbytes(), index, f"{list(tensor.shape)} {dtype}")
