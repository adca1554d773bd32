"""Measured time of each declared operation of a model: forward, recomputation and backward.

One step runs in eager mode under torch's profiler with labels on its operations (`operation_labels`). Backward nodes
are matched to their forward operation by autograd's sequence numbers. On a CPU times are those of the host, on a GPU
those of the kernels that an operation launched.

Three names are no declared operations: "gradient additions", where autograd adds several gradients of one tensor,
"gradient accumulation" into `.grad`, and "other".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from trimtab.lab.operation_labels import (
    BLOCK,
    DEQUANTIZE,
    PREFIX,
    labelled_attention_parts,
    labelled_operations,
)
from trimtab.lab.timing import synchronize
from trimtab.model.decoder import Decoder
from trimtab.model.spec_block import ATTENTION_RESIDUAL, FEED_FORWARD_RESIDUAL
from trimtab.report.document_markdown import aligned_table

FORWARD, RECOMPUTE, BACKWARD = "forward", "recompute", "backward"
PHASES = (FORWARD, RECOMPUTE, BACKWARD)
ADDITIONS, ACCUMULATION, OTHER = "gradient additions", "gradient accumulation", "other"
UNDECLARED = (ADDITIONS, ACCUMULATION, OTHER)

_NODE = "autograd::engine::evaluate_function: "
_LAUNCHES = ("cuda", "cuLaunch", "hip")
_BACKWARD_FUNCTION = 1
"""torch's RecordScope of an autograd node's function."""
_COPIES = ("aten::contiguous", "aten::clone")


@dataclass(frozen=True)
class MeasuredTime:
    """Seconds of one operation in one phase, over all layers of a step."""

    operation: str
    phase: str
    seconds: float


@dataclass(frozen=True)
class OperationTimes:
    """All operations of one step."""

    rows: tuple[MeasuredTime, ...]
    step_seconds: float
    """The profiled step: by the host's clock on a CPU, the sum of all kernels on a GPU."""

    def seconds(self, operation: str, phase: str | None = None) -> float:
        """Seconds of one operation, in one phase or in all.

        Example:
            >>> rows = MeasuredTime("rope", "forward", 0.25), MeasuredTime("rope", "backward", 0.5)
            >>> times = OperationTimes(rows, step_seconds=1.0)
            >>> times.seconds("rope"), times.seconds("rope", "backward"), times.attributed
            (0.75, 0.5, 0.75)
        """
        return sum(
            row.seconds for row in self.rows if row.operation == operation and phase in (None, row.phase)
        )

    @property
    def attributed(self) -> float:
        """The share of the step that is attributed to an operation other than "other"."""
        named = sum(row.seconds for row in self.rows if row.operation != OTHER)
        return named / self.step_seconds if self.step_seconds else 0.0

    def table(self) -> str:
        """A text table of operations by phase, in milliseconds."""
        names = dict.fromkeys(row.operation for row in self.rows)
        rows = [["operation", *PHASES]]
        rows += [[name, *(f"{1e3 * self.seconds(name, phase):.3f}" for phase in PHASES)] for name in names]
        return aligned_table(rows)


def measure_operations(
    decoder: Decoder,
    step: Callable[[], object],
    device: str,
    *,
    rounds: int = 5,
    attention_parts: bool = False,
) -> OperationTimes:
    """Profiles steps and attributes the time of the fastest one, which other work disturbed least.

    Args:
        decoder: the model as `trimtab.run.build` makes it, not compiled.
        step: one forward and backward pass of it, without CUDA graphs.
        device: cpu or cuda.
        rounds: the number of profiled steps.
        attention_parts: whether the products and the softmax of plain attention have separate rows; "attention" is then
            the remainder.

    Example:
        >>> measure_operations(decoder, step, "cpu").seconds("mlp.down_proj")        # doctest: +SKIP
        0.0123
    """
    assert decoder.regions is None, (
        "compiled blocks hide their operations: build the model with torch_compile: false"
    )
    step()
    parts = labelled_attention_parts if attention_parts else nullcontext
    candidates = (_profiled(decoder, step, device, parts()) for _ in range(rounds))
    return min(candidates, key=lambda times: times.step_seconds)


def _profiled(
    decoder: Decoder, step: Callable[[], object], device: str, parts: AbstractContextManager[None]
) -> OperationTimes:
    cuda = device.startswith("cuda")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with labelled_operations(decoder), parts:
        synchronize(device)
        with profile(activities=activities) as profiled:
            with torch.profiler.record_function(PREFIX + OTHER):
                step()
            synchronize(device)
    return attribute(profiled.events() or (), cuda=cuda)


@dataclass
class _Scope:
    """A label, a backward node or a single event, while the events of a thread are walked."""

    operation: str
    phase: str
    start: float
    end: float
    is_node: bool = False
    function_end: float | None = None
    """For a node: the end of its own function; after that, autograd adds gradients."""
    inner: float = 0.0
    """Microseconds of nested scopes."""


def attribute(events: Iterable[Any], *, cuda: bool) -> OperationTimes:
    """The times of a profiled step, from the profiler's events."""
    kinds = torch.autograd.DeviceType
    everything = list(events)
    on_host = [event for event in everything if event.device_type == kinds.CPU]
    walk = _Walk(cuda)
    # The thread with the outermost label first: it creates the nodes that other threads run.
    main = next(event.thread for event in on_host if event.name == PREFIX + OTHER)
    for thread in sorted({event.thread for event in on_host}, key=lambda ident: ident != main):
        walk.thread([event for event in on_host if event.thread == thread])
    if cuda:
        walk.kernels([event for event in everything if event.device_type == kinds.CUDA])
    rows = [MeasuredTime(*key, us / 1e6) for key, us in walk.times.items() if us > 0]
    rows.sort(key=lambda row: row.operation in UNDECLARED)
    return OperationTimes(tuple(rows), walk.total / 1e6)


class _Walk:
    """Attributes events, in their order, to scopes."""

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self.times: dict[tuple[str, str], float] = {}
        self.total = 0.0
        self.owners: dict[tuple[int, int], str] = {}
        """The operation that created a node, by (thread, sequence number)."""
        self.launches: dict[int, tuple[str, str]] = {}
        """(operation, phase) of each launch, by its correlation id."""
        self.last = ""
        """The previous label, which distinguishes the two residual additions."""

    def thread(self, events: Sequence[Any]) -> None:
        """Attributes the events of one thread, outer ones before inner ones."""
        stack: list[_Scope] = []
        for event in sorted(events, key=lambda entry: (entry.time_range.start, -entry.time_range.end)):
            while stack and stack[-1].end <= event.time_range.start:
                self._close(stack)
            scope = self._opened(event, stack)
            if scope is not None:
                stack.append(scope)
            if stack:
                self._note(event, stack[-1])
        while stack:
            self._close(stack)

    def _opened(self, event: Any, stack: list[_Scope]) -> _Scope | None:
        """The scope that an event opens, if any."""
        start, end = event.time_range.start, event.time_range.end
        top = stack[-1] if stack else None
        if event.name.startswith(PREFIX):
            name = event.name.removeprefix(PREFIX)
            if name == DEQUANTIZE and top is not None:
                return _Scope(f"{top.operation} {DEQUANTIZE}", top.phase, start, end)
            if top is not None and top.operation == name and not top.is_node:
                return None  # a method that calls another method of the same layer
            if name not in (BLOCK, OTHER):
                self.last = name
            recomputed = any(scope.is_node for scope in stack)
            return _Scope(name, RECOMPUTE if recomputed else FORWARD, start, end)
        if event.name.startswith(_NODE):
            owner = self.owners.get((event.fwd_thread, event.sequence_nr), OTHER)
            if "AccumulateGrad" in event.name:
                owner = ACCUMULATION
            return _Scope(owner, BACKWARD, start, end, is_node=True)
        if top is None or event.name.startswith(_LAUNCHES):
            return None
        if top.operation == BLOCK:
            return _Scope(self._in_block(event), top.phase, start, end)
        if top.function_end is not None and start >= top.function_end:
            return _Scope(ADDITIONS, BACKWARD, start, end)
        return None

    def _in_block(self, event: Any) -> str:
        """The operation of an event inside a block and outside its labels."""
        if event.name == "aten::add":
            return FEED_FORWARD_RESIDUAL if self.last.startswith("mlp.") else ATTENTION_RESIDUAL
        return "self_attn.v" if event.name in _COPIES else OTHER

    def _note(self, event: Any, scope: _Scope) -> None:
        """Records launches, ends of node functions, and the operation that created each node."""
        if event.name.startswith(_LAUNCHES):
            self.launches[event.id] = (scope.operation, scope.phase)
        elif event.scope == _BACKWARD_FUNCTION:
            if scope.is_node and scope.function_end is None:
                scope.function_end = event.time_range.end
        elif event.sequence_nr >= 0 and not event.name.startswith(_NODE):
            self.owners[(event.thread, event.sequence_nr)] = scope.operation

    def _close(self, stack: list[_Scope]) -> None:
        scope = stack.pop()
        spent = scope.end - scope.start
        if stack:
            stack[-1].inner += spent
        if self.cuda:
            return
        if not stack:
            self.total += spent
        self._add(scope.operation, scope.phase, spent - scope.inner)

    def kernels(self, events: Sequence[Any]) -> None:
        """Attributes kernels and copies of the device by their launches."""
        for event in events:
            if event.is_user_annotation or event.name.startswith(PREFIX):
                continue
            spent = event.time_range.end - event.time_range.start
            self.total += spent
            self._add(*self.launches.get(event.id, (OTHER, FORWARD)), spent)

    def _add(self, operation: str, phase: str, microseconds: float) -> None:
        key = (OTHER if operation == BLOCK else operation, phase)
        self.times[key] = self.times.get(key, 0.0) + microseconds
