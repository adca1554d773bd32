"""A run's memory reduced for reports, as plain data: the peak, a timeline of few points, the largest allocations.

Imports no torch: reports read it from records.
"""

from __future__ import annotations

import bisect
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trimtab.facts.errors import DataError
from trimtab.facts.tensor_kinds import TensorKind
from trimtab.lab.memory_blocks import ROLES, AttributedTimeline, MemoryBlock, MemoryPoint

POINTS = 300
"""Maximum number of moments of a drawn timeline; each is the largest of its stretch."""
SIGNIFICANT = 0.0005
"""Share of the peak below which an allocation counts in the levels, but not on the axis: some kernels would fill it
with thousands of them."""
LARGEST = 12
"""Number of listed groups of equal allocations."""
ALIGNMENT = 512
"""Bytes to which torch's CUDA allocator rounds up."""
_LAYER = re.compile(r"\.\d+(?=\.|$)")


@dataclass(frozen=True)
class Allocations:
    """Equal blocks at the peak, usually one per layer."""

    nbytes: int
    """Bytes of each block."""
    count: int
    role: str
    name: str
    module: str
    """With * for the layer index; empty if it is unknown."""
    line: str
    phase: str

    @property
    def total(self) -> int:
        """Bytes of all of them."""
        return self.nbytes * self.count


@dataclass(frozen=True)
class Span:
    """A phase of the timeline, from one event to another."""

    phase: str
    start: int
    end: int


@dataclass(frozen=True)
class DrawnTimeline:
    """Selected moments of a timeline: the largest of each stretch, including the peak."""

    events: tuple[int, ...]
    """The number of the significant event at which each moment's stretch begins; 0 is before the first."""
    series: Mapping[str, tuple[int, ...]]
    """Bytes of each role at these moments, without roles that are always 0."""
    titles: tuple[str, ...]
    phases: tuple[Span, ...]
    end: int
    least: int = 0
    """Bytes of a significant allocation."""


@dataclass(frozen=True)
class MemorySummary:
    """One run's memory."""

    peak_bytes: int
    before_bytes: int
    phase: str
    """Phase of the peak."""
    module: str
    """Module of the allocation that reached the peak."""
    buckets: Mapping[str, int]
    """At the peak, by `TensorKind`."""
    parts: Mapping[str, int]
    """The activations at the peak, by part."""
    largest: tuple[Allocations, ...]
    timeline: DrawnTimeline

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @staticmethod
    def from_dict(record: Mapping[str, Any]) -> MemorySummary:
        """Inverse of `to_dict`; raises DataError if the record is damaged."""
        try:
            drawn = record["timeline"]
            timeline = DrawnTimeline(
                tuple(int(event) for event in drawn["events"]),
                {str(name): tuple(int(v) for v in values) for name, values in drawn["series"].items()},
                tuple(str(title) for title in drawn["titles"]),
                tuple(Span(**span) for span in drawn["phases"]),
                int(drawn["end"]),
                int(drawn["least"]),
            )
            largest = tuple(Allocations(**entry) for entry in record["largest"])
            known = {**record, "timeline": timeline, "largest": largest}
            return MemorySummary(**known)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"a record of memory is damaged: {type(error).__name__}: {error}",
                "measure it with --remeasure",
            ) from None


def summarize(timeline: AttributedTimeline, *, points: int = POINTS, largest: int = LARGEST) -> MemorySummary:
    """The summary of a timeline.

    Args:
        timeline: from `trimtab.lab.memory_recorder.record_memory`.
        points: the maximum number of moments to draw.
        largest: the maximum number of groups of allocations to list.

    Example:
        >>> from trimtab.facts.phases import RunPhase
        >>> from trimtab.lab.memory_blocks import PhaseSpan, Role
        >>> weights = MemoryBlock(8, Role(TensorKind.WEIGHTS))
        >>> made = MemoryBlock(4, Role(TensorKind.OTHER), start=0, end=1)
        >>> timeline = AttributedTimeline((weights, made), (PhaseSpan(RunPhase.FORWARD, 0, 2),), num_events=2)
        >>> found = summarize(timeline)
        >>> found.peak_bytes, found.phase, found.buckets["weights"], found.timeline.series["other"]
        (12, 'forward', 8, (0, 4, 0))
    """
    moments = list(timeline.moments())
    peak = max(moments, key=lambda moment: moment.total)
    allocated = {block.start: block for block in timeline.blocks if block.start is not None}
    phase = timeline.phase_at(peak.event)
    reached = allocated.get(peak.event)
    return MemorySummary(
        peak_bytes=peak.total,
        before_bytes=moments[0].total,
        phase="" if phase is None else phase.value,
        module="" if reached is None else _module(reached),
        buckets={kind.value: nbytes for kind, nbytes in peak.by_kind().items()},
        parts={
            role.name: nbytes
            for role, nbytes in peak.roles.items()
            if role.kind is TensorKind.ACTIVATIONS and nbytes
        },
        largest=group_allocations(timeline.alive_at(peak.event))[:largest],
        timeline=_drawn(timeline, moments, allocated, points),
    )


def group_allocations(blocks: Iterable[MemoryBlock]) -> tuple[Allocations, ...]:
    """Groups equal blocks, the largest groups first; blocks from before the run are skipped.

    Example:
        >>> from trimtab.lab.memory_blocks import Role
        >>> role = Role(TensorKind.ACTIVATIONS)
        >>> blocks = [MemoryBlock(4, role, "mm", f"layers.{i}.mlp", "a.py:3 (f)", start=i) for i in range(3)]
        >>> [(one.count, one.total, one.module) for one in group_allocations(blocks)]
        [(3, 12, 'layers.*.mlp')]
    """
    counts: Counter[tuple[Any, ...]] = Counter(
        (
            block.nbytes,
            block.role.name,
            _LAYER.sub(".*", block.name),
            _module(block),
            block.line or "",
            "" if block.phase is None else block.phase.value,
        )
        for block in blocks
        if block.start is not None
    )
    groups = [Allocations(nbytes, count, *rest) for (nbytes, *rest), count in counts.items()]
    return tuple(sorted(groups, key=lambda group: -group.total))


@dataclass(frozen=True)
class FoundSize:
    """Allocations of one size by one module."""

    module: str
    phase: str
    role: str
    count: int


def find_size(timeline: AttributedTimeline, nbytes: int) -> tuple[FoundSize, ...]:
    """Counts the allocations whose tensor has exactly `nbytes`, by module, phase and role, in their order.

    If the tensor is unknown, as in the backward pass, the block's own size counts, rounded up as the allocator does.

    Example:
        >>> from trimtab.facts.phases import RunPhase
        >>> from trimtab.lab.memory_blocks import Role
        >>> block = MemoryBlock(512, Role(TensorKind.ACTIVATIONS), module="layers.0", phase=RunPhase.FORWARD, start=0)
        >>> find_size(AttributedTimeline((block,), (), num_events=1), 500)
        (FoundSize(module='layers.*', phase='forward', role='activations', count=1),)
    """
    rounded = -(-nbytes // ALIGNMENT) * ALIGNMENT
    counts: Counter[tuple[str, str, str]] = Counter()
    for block in timeline.blocks:
        if block.start is None or block.phase is None:
            continue
        known = block.tensor_bytes
        if known == nbytes or (known is None and block.nbytes in (nbytes, rounded)):
            counts[(_module(block), block.phase.value, block.role.name)] += 1
    return tuple(FoundSize(*key, count) for key, count in counts.items())


def _module(block: MemoryBlock) -> str:
    return _LAYER.sub(".*", block.module or "")


def _drawn(
    timeline: AttributedTimeline,
    moments: Sequence[MemoryPoint],
    allocated: Mapping[int, MemoryBlock],
    points: int,
) -> DrawnTimeline:
    peak = max(moment.total for moment in moments)
    least = int(SIGNIFICANT * peak)
    events = sorted(
        event
        for block in timeline.blocks
        if block.nbytes >= least
        for event in (block.start, block.end)
        if event is not None
    )
    chosen = _largest_of_stretches(moments, events, points)
    series = {role.name: tuple(moment.roles[role] for _, moment in chosen) for role in ROLES}
    phases = [
        Span(
            phase.phase.value, bisect.bisect_left(events, phase.start), bisect.bisect_left(events, phase.end)
        )
        for phase in timeline.phases
    ]
    return DrawnTimeline(
        tuple(number for number, _ in chosen),
        {name: values for name, values in series.items() if any(values)},
        tuple(_title(timeline, moment, allocated) for _, moment in chosen),
        tuple(span for span in phases if span.end > span.start),
        len(events) + 1,
        least,
    )


def _largest_of_stretches(
    moments: Sequence[MemoryPoint], events: Sequence[int], points: int
) -> list[tuple[int, MemoryPoint]]:
    """(number of a significant event, moment): the largest moment of each of `points` stretches.

    A stretch is a range of significant events, with all insignificant events after them.
    """
    # indices of `moments`; the first moment precedes all events
    starts = [0, *(event + 1 for event in events)]
    step = -(-len(starts) // points)
    largest = []
    for number in range(0, len(starts), step):
        end = starts[number + step] if number + step < len(starts) else len(moments)
        largest.append((number, max(moments[starts[number] : end], key=lambda moment: moment.total)))
    return largest


def _title(timeline: AttributedTimeline, moment: MemoryPoint, allocated: Mapping[int, MemoryBlock]) -> str:
    """The title of a moment: the phase, and the allocating module."""
    phase = timeline.phase_at(moment.event)
    if phase is None:
        return "before"
    block = allocated.get(moment.event)
    if block is None:
        return f"{phase.value}: released"
    return f"{phase.value}: {block.module or block.name}"
