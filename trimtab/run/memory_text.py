"""Formats a memory report as text: a few lines for the terminal, and everything for oom.txt."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trimtab.facts.units import format_bytes
from trimtab.run.live_tensors import LiveTensor, Origin
from trimtab.run.memory_report import MemoryReport, describe_failure

SHOWN_GROUPS = 4
SHOWN_PROCESSES = 3
FULL_GROUPS = 40
RECORDING = "--explain-memory"


@dataclass(frozen=True)
class TensorGroup:
    """Tensors of one shape that have the same role in different layers."""

    count: int
    bytes: int
    example: LiveTensor
    name: str
    """With `*` in place of the layer index if the group has several tensors."""
    module: str | None

    def describe(self) -> str:
        """Returns one line of text."""
        shape = f"{list(self.example.shape)} {self.example.dtype}"
        times = f"{self.count} × " if self.count > 1 else ""
        in_module = f" ({self.module})" if self.module and self.module not in self.name else ""
        line = f", {self.example.origin.line}" if self.example.origin.line else ""
        return f"{format_bytes(self.bytes)}: {times}{shape}, {self.name}{in_module}{line}"


def group_tensors(tensors: Sequence[LiveTensor]) -> list[TensorGroup]:
    """Groups the corresponding tensors of different layers, the largest group first.

    Example:
        >>> from trimtab.facts.tensor_kinds import TensorKind
        >>> layers = [LiveTensor(TensorKind.WEIGHTS, f"layers.{i}.up", (8,), "float32", "cpu", 32) for i in range(2)]
        >>> group_tensors(layers)[0].describe()
        '64 B: 2 × [8] float32, layers.*.up'
    """
    groups: dict[tuple[object, ...], list[LiveTensor]] = {}
    for tensor in tensors:
        place = tensor.origin
        key = (tensor.kind, _starred(tensor.name), _starred(place.module or ""), place.line, tensor.shape)
        groups.setdefault((*key, tensor.dtype), []).append(tensor)
    found = []
    for members in groups.values():
        first, several = members[0], len(members) > 1
        module = first.origin.module
        found.append(
            TensorGroup(
                len(members),
                sum(tensor.bytes for tensor in members),
                first,
                _starred(first.name) if several else first.name,
                _starred(module) if several and module else module,
            )
        )
    return sorted(found, key=lambda group: -group.bytes)


def _starred(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)


def summary_lines(report: MemoryReport) -> list[str]:
    """The lines below the error on a terminal: at most twelve."""
    lines = [*_predicted(report), *_measured(report), *_buckets(report)]
    if place := _describe_origin(report.requested_at):
        lines.append(f"requested by  {place}")
    for index, group in enumerate(group_tensors(report.tensors)[:SHOWN_GROUPS]):
        lines.append(f"{'largest' if index == 0 else '':<13} {group.describe()}")
    return lines


def full_text(report: MemoryReport, remedies: Sequence[str] = ()) -> str:
    """Everything, for oom.txt."""
    parts = [describe_failure(report), report.message, ""]
    parts += [*_predicted(report), *_measured(report, every_process=True), *_buckets(report)]
    if place := _describe_origin(report.requested_at):
        parts.append(f"requested by  {place}")
    if remedies:
        parts += ["", "Changes that save memory, cheapest first:", *(f"  {remedy}" for remedy in remedies)]
    parts += ["", f"Largest live tensors ({len(report.tensors)} are listed in oom.json):"]
    parts += [f"  {group.describe()}" for group in group_tensors(report.tensors)[:FULL_GROUPS]]
    if not report.recorded:
        parts += ["", f"Add {RECORDING} to record the lines that allocate them."]
    return "\n".join(parts) + "\n"


def _predicted(report: MemoryReport) -> Iterator[str]:
    predicted = report.predicted
    if predicted is None:
        return
    own = predicted.phase_allocated is not None and predicted.phase_allocated != predicted.allocated
    phase = f", {format_bytes(predicted.phase_allocated or 0)} in this phase" if own else ""
    host = (
        ""
        if report.state.on_gpu or predicted.host is None
        else f", {format_bytes(predicted.host)} on the host"
    )
    yield (
        f"predicted     {format_bytes(predicted.allocated)} of tensors at the peak ({predicted.moment}){phase}, "
        f"{format_bytes(predicted.process)} for the whole process{host}"
    )


def _measured(report: MemoryReport, *, every_process: bool = False) -> Iterator[str]:
    state = report.state
    named = {
        "allocated": state.allocated,
        "reserved": state.reserved,
        "for the whole process": state.process,
    }
    parts = [f"{format_bytes(amount)} {name}" for name, amount in named.items() if amount is not None]
    if state.free is not None and state.total is not None:
        parts.append(f"{format_bytes(state.free)} free of {format_bytes(state.total)}")
    if state.address_space is not None:
        parts.append(f"limited to {format_bytes(state.address_space)} of address space (ulimit -v)")
    if parts:
        yield f"measured      {', '.join(parts)}"
    if state.fragmented is not None:
        block = state.largest_free_block
        largest = "" if block is None else f"; the largest free block is {format_bytes(block)}"
        yield f"fragmentation {format_bytes(state.fragmented)} reserved but not allocated{largest}"
    if state.others:
        shown = state.others if every_process else state.others[:SHOWN_PROCESSES]
        listed = ", ".join(f"{other.describe()} (pid {other.pid})" for other in shown)
        more = len(state.others) - len(shown)
        yield f"also on GPU   {listed}{f' and {more} more' if more else ''}"


def _buckets(report: MemoryReport) -> Iterator[str]:
    if not report.buckets:
        return
    predicted = report.predicted.buckets if report.predicted is not None else {}
    parts = []
    for name, amount in report.buckets.items():
        expected = f" (predicted {format_bytes(predicted[name])})" if name in predicted else ""
        if amount or predicted.get(name):
            parts.append(f"{name} {format_bytes(amount)}{expected}")
    if parts:
        yield f"live tensors  {', '.join(parts)}"


def _describe_origin(origin: Origin) -> str:
    return ", ".join(part for part in (origin.module, origin.line) if part)
