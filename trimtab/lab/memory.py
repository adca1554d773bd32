"""Memory of a run: its peak, and the timeline of allocations.

Both come from the allocation events of torch's profiler, on a CPU as on a GPU, where torch's caching allocator reports
to the profiler: bytes are those that the allocator counts as allocated, so that the peak of a timeline is
`torch.cuda.max_memory_allocated`. `memory_recorder.py` adds role, module and source line to each allocation.

The profiler's trace lists every allocation and release. Its event tree knows the ranges that enclose them, but omits
events of a GPU outside of any operator, such as the release of a tensor that Python deletes.
"""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path
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


def collect_garbage(device: str) -> None:
    """Releases unreachable tensors, such as an earlier model with reference cycles.

    Python releases them at any time, also during a measurement, which then reports too little memory.

    Example:
        >>> collect_garbage("cpu")
    """
    gc.collect()
    synchronize(device)


def peak_bytes(run: Callable[[], object], device: str = "cuda") -> int:
    """Peak bytes of a run's tensors, relative to the memory allocated before it.

    Example:
        >>> peak_bytes(lambda: torch.empty(1024, dtype=torch.uint8), "cpu")
        1024
    """
    if not device.startswith("cuda"):
        return memory_timeline(run, device).peak_bytes
    collect_garbage(device)
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
    collect_garbage(device)
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
    collect_garbage(device)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = run()
        synchronize(device)
        del result
    results = profiled.profiler.kineto_results if profiled.profiler is not None else None
    assert results is not None, "the profiler ended without a result"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(file))
        listed = traced_allocations(json.loads(file.read_bytes(), parse_float=Decimal), device)
    return MemoryTimeline(tuple(allocation_events(results.experimental_event_tree(), listed, device)))


@dataclass(frozen=True)
class Allocation:
    """An allocation (positive bytes) or release (negative bytes) as the profiler records it."""

    nanoseconds: int
    """Since the epoch."""
    nbytes: int
    address: int


def traced_allocations(trace: dict[str, Any], device: str) -> list[Allocation]:
    """All allocations and releases on a device from a trace of the profiler.

    Args:
        trace: Chrome's trace format; decimal numbers as `Decimal`, since a float has too few digits for nanoseconds.
        device: cpu or cuda; with several GPUs, torch's current one.

    Example:
        >>> about = {"Device Type": 0, "Device Id": -1, "Bytes": 64, "Addr": 4096}
        >>> event = {"name": "[memory]", "ts": Decimal("7.001"), "args": about}
        >>> traced_allocations({"baseTimeNanoseconds": 10, "traceEvents": [event]}, "cpu")
        [Allocation(nanoseconds=7011, nbytes=64, address=4096)]
    """
    wanted = _wanted_device(device)
    base, found = int(trace.get("baseTimeNanoseconds", 0)), []
    for event in trace["traceEvents"]:
        if event.get("name") != "[memory]":
            continue
        about = event["args"]
        if wanted(_DEVICE_TYPES.get(about["Device Type"]), about["Device Id"]):
            nanoseconds = base + int(event["ts"] * 1000)
            found.append(Allocation(nanoseconds, about["Bytes"], about["Addr"]))
    return found


_DEVICE_TYPES = {0: "cpu", 1: "cuda"}
"""Names of torch's device types in a trace."""


def _wanted_device(device: str) -> Callable[[str | None, int | None], bool]:
    """Whether an event's device type and index are those of `device`."""
    kind = "cuda" if device.startswith("cuda") else "cpu"
    index = torch.cuda.current_device() if kind == "cuda" else None
    return lambda type_, number: type_ == kind and (index is None or number == index)


def allocation_events(roots: list[Any], listed: Iterable[Allocation], device: str) -> list[MemoryEvent]:
    """The allocations and releases on a device in their order, with the ranges that enclose them.

    Args:
        roots: from `experimental_event_tree()`.
        listed: all allocations of the trace; those that the tree omits have no ranges around them.
        device: cpu or cuda; with several GPUs, torch's current one.
    """
    wanted = _wanted_device(device)
    entries: list[tuple[int, Allocation | None, EnclosingRanges]] = []
    waiting: list[tuple[Any, EnclosingRanges]] = [(root, EnclosingRanges()) for root in roots]
    while waiting:
        event, around = waiting.pop()
        if event.tag == _EventType.TorchOp:
            around = _inside(event, around)
            if around.label is not None and event.name.startswith(LABEL):
                entries.append((event.start_time_ns, None, around))
        elif event.tag == _EventType.Allocation:
            fields = event.extra_fields
            if wanted(fields.device.type, fields.device.index):
                allocation = Allocation(event.start_time_ns, fields.alloc_size, fields.ptr)
                entries.append((event.start_time_ns, allocation, around))
        waiting += [(child, around) for child in event.children]
    in_tree, in_trace = {allocation for _, allocation, _ in entries if allocation}, set(listed)
    assert in_tree <= in_trace, "the profiler's trace lacks allocations of its event tree"
    entries += [(one.nanoseconds, one, EnclosingRanges()) for one in in_trace - in_tree]
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


def _in_order(entries: list[tuple[int, Allocation | None, EnclosingRanges]]) -> Iterator[MemoryEvent]:
    """Memory events from (nanoseconds, allocation, ranges); the start of a labelled range has no allocation."""
    first = next((nanoseconds for nanoseconds, allocation, _ in entries if allocation is not None), 0)
    after = None
    for nanoseconds, allocation, around in entries:
        if allocation is None:
            after = around.label
        else:
            around = replace(around, after=after)
            seconds = (nanoseconds - first) / 1e9
            yield MemoryEvent(seconds, allocation.nbytes, allocation.address, around)
