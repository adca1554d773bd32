"""Memory of a run: its peak, and the timeline of allocations.

Both come from the allocation events of torch's profiler, on a CPU as on a GPU, where torch's caching allocator reports
to the profiler: bytes are those that the allocator counts as allocated, so that the peak of a timeline is
`torch.cuda.max_memory_allocated`. `memory_recorder.py` adds role, module and source line to each allocation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

from trimtab.lab.timing import synchronize

LABEL = "allocates: "
"""Prefix of the name of a profiler range around an operation; the operation's number follows."""
_NODE = "autograd::engine::evaluate_function: "
_ACCUMULATES = "AccumulateGrad"
_OPERATION = ("aten::", "trimtab::")


@dataclass(frozen=True)
class EnclosingRanges:
    """The profiler's ranges that enclose an event, by their ids."""

    label: int | None = None
    """The number of the innermost range whose name begins with `LABEL`."""
    after: int | None = None
    """The number of the last such range that began before the event."""
    node: int | None = None
    """The enclosing autograd node of the backward pass."""
    sequence: int | None = None
    """Autograd's sequence number of that node, which the forward operation that created it has as well."""
    accumulates: bool = False
    """Whether the node accumulates a parameter's gradient."""
    call: int | None = None
    """The outermost torch operation inside of label or node."""
    operation: str = ""
    """Its name."""


@dataclass(frozen=True)
class MemoryEvent:
    """One allocation (positive bytes) or release (negative bytes)."""

    seconds: float
    """Since the first event."""
    nbytes: int
    address: int = 0
    around: EnclosingRanges = EnclosingRanges()


@dataclass(frozen=True)
class MemoryTimeline:
    """Allocations and releases of a run in their order, relative to the memory allocated before it."""

    events: tuple[MemoryEvent, ...]

    def levels(self) -> list[tuple[float, int]]:
        """(seconds, bytes allocated since the beginning) after each event.

        Example:
            >>> MemoryTimeline((MemoryEvent(0.0, 8), MemoryEvent(0.5, -8))).levels()
            [(0.0, 8), (0.5, 0)]
        """
        levels, level = [], 0
        for event in self.events:
            level += event.nbytes
            levels.append((event.seconds, level))
        return levels

    @property
    def peak_bytes(self) -> int:
        """Peak bytes.

        Example:
            >>> MemoryTimeline((MemoryEvent(0.0, 8), MemoryEvent(0.1, -8), MemoryEvent(0.2, 4))).peak_bytes
            8
        """
        return max((level for _, level in self.levels()), default=0)


def peak_bytes(run: Callable[[], object], device: str = "cuda") -> int:
    """Peak bytes of a run's tensors, relative to the memory allocated before it.

    Example:
        >>> peak_bytes(lambda: torch.empty(1024, dtype=torch.uint8), "cpu")
        1024
    """
    if not device.startswith("cuda"):
        return memory_timeline(run, device).peak_bytes
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = run()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    del result
    return peak - before


def retained_bytes(run: Callable[[], object], device: str = "cuda") -> int:
    """Bytes still allocated after a run while its result is alive: of a forward pass, its output and saved
    activations.

    Example:
        >>> retained_bytes(lambda: torch.empty(256).exp(), "cpu")
        1024
    """
    results: list[object] = []
    if not device.startswith("cuda"):
        levels = memory_timeline(lambda: results.append(run()), device).levels()
        return levels[-1][1] if levels else 0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    results.append(run())
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated() - before


def memory_timeline(run: Callable[[], object], device: str) -> MemoryTimeline:
    """Records every allocation and release of a run; its result is released at the end.

    Example:
        >>> timeline = memory_timeline(lambda: torch.empty(256).clone(), "cpu")
        >>> timeline.peak_bytes
        2048
    """
    synchronize(device)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = run()
        synchronize(device)
        del result
    results = profiled.profiler.kineto_results if profiled.profiler is not None else None
    assert results is not None, "the profiler ended without a result"
    return MemoryTimeline(tuple(allocation_events(results.experimental_event_tree(), device)))


def allocation_events(roots: list[Any], device: str) -> list[MemoryEvent]:
    """The allocations and releases on a device from the profiler's event tree, in their order.

    Args:
        roots: from `experimental_event_tree()`.
        device: cpu or cuda; with several GPUs, torch's current one.
    """
    kind = "cuda" if device.startswith("cuda") else "cpu"
    index = torch.cuda.current_device() if kind == "cuda" else None
    entries: list[tuple[int, Any, EnclosingRanges]] = []
    waiting: list[tuple[Any, EnclosingRanges]] = [(root, EnclosingRanges()) for root in roots]
    while waiting:
        event, around = waiting.pop()
        if event.tag == _EventType.TorchOp:
            around = _inside(event, around)
            if around.label is not None and event.name.startswith(LABEL):
                entries.append((event.start_time_ns, None, around))
        elif event.tag == _EventType.Allocation:
            fields = event.extra_fields
            if fields.device.type == kind and (index is None or fields.device.index == index):
                entries.append((event.start_time_ns, fields, around))
        waiting += [(child, around) for child in event.children]
    entries.sort(key=lambda entry: entry[0])
    return list(_in_order(entries))


def _inside(event: Any, around: EnclosingRanges) -> EnclosingRanges:
    """The ranges that enclose the children of an event."""
    name: str = event.name
    if name.startswith(LABEL):
        return replace(around, label=int(name.removeprefix(LABEL)), call=None, operation="")
    if name.startswith(_NODE):
        node, sequence = event.id, event.extra_fields.sequence_number
        return EnclosingRanges(node=node, sequence=sequence, accumulates=_ACCUMULATES in name)
    if around.call is not None or (around.node is not None and not name.startswith(_OPERATION)):
        return around  # inside of an operation, or a node's own function
    return replace(around, call=event.id, operation=name)


def _in_order(entries: list[tuple[int, Any, EnclosingRanges]]) -> Iterator[MemoryEvent]:
    """Memory events from (nanoseconds, fields of an allocation, ranges); the start of a labelled range has no
    fields."""
    first = next((nanoseconds for nanoseconds, fields, _ in entries if fields is not None), 0)
    after = None
    for nanoseconds, fields, around in entries:
        if fields is None:
            after = around.label
        else:
            around = replace(around, after=after)
            yield MemoryEvent((nanoseconds - first) / 1e9, fields.alloc_size, fields.ptr, around)
