"""Memory blocks of reports: the stacked timeline, the buckets at the peak, the largest allocations. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.facts.phases import RunPhase
from trimtab.facts.tensor_kinds import TensorKind
from trimtab.facts.units import format_bytes
from trimtab.lab.memory_summary import Allocations, MemorySummary
from trimtab.report.document import Band, StackChart, Table, TimelinePhase
from trimtab.report.timeline import PARTS, SERIES

ROLES = {name: role for _, name, role in SERIES} | PARTS
"""The colour name of each series of a timeline."""
UNKNOWN_LINE = "–"


def timeline_chart(
    summary: MemorySummary, *, id: str, title: str, limit: int | None = None, note: str = ""
) -> StackChart:
    """The memory of a run over its events, stacked by bucket and part, with its phases.

    Args:
        summary: the run's memory.
        id: the chart's id: letters, digits and dashes.
        title: the chart's title.
        limit: the device's bytes, to draw a line there.
        note: the text below the chart.
    """
    drawn = summary.timeline
    bands = tuple(
        Band(name, ROLES.get(name, name), tuple(float(value) for value in values))
        for name, values in drawn.series.items()
    )
    phases = tuple(TimelinePhase(span.phase, span.start + 1, span.end + 1) for span in drawn.phases)
    return StackChart(
        id,
        title,
        f"allocations and releases of {format_bytes(drawn.least)} or more, in order",
        "bytes",
        tuple(float(event) for event in drawn.events),
        float(drawn.end),
        bands,
        phases,
        drawn.titles,
        limit,
        note,
    )


def largest_table(title: str, largest: Sequence[Allocations], peak_bytes: int) -> Table:
    """The largest groups of equal allocations at the peak, with module and line.

    Example:
        >>> one = Allocations(2**20, 12, "attention", "_softmax [4, 12]", "layers.*.self_attn", "a.py:5 (f)", "forward")
        >>> largest_table("", [one], 2**24).rows[0][:4]
        ('_softmax [4, 12]', '12 × 1.00 MiB', '12.0 MiB', '75.0 %')
    """
    rows = tuple(
        (
            group.name,
            f"{group.count} × {format_bytes(group.nbytes)}",
            format_bytes(group.total),
            f"{group.total / peak_bytes:.1%}".replace("%", " %"),
            group.role,
            group.phase,
            group.module or UNKNOWN_LINE,
            group.line or UNKNOWN_LINE,
        )
        for group in largest
    )
    head = ("allocation", "at the peak", "total", "of the peak", "role", "phase", "module", "line")
    return Table(title, head, rows)


def bucket_cells(buckets: dict[str, int] | MemorySummary) -> tuple[str, ...]:
    """The bytes of each bucket, in the order of `TensorKind`.

    Example:
        >>> bucket_cells({"weights": 1024, "activations": 2048})
        ('1.00 KiB', '–', '–', '2.00 KiB', '–')
    """
    known = buckets.buckets if isinstance(buckets, MemorySummary) else buckets
    return tuple(format_bytes(known[kind.value]) if known.get(kind.value) else "–" for kind in TensorKind)


def peak_sentence(name: str, summary: MemorySummary) -> str:
    """Where the peak is, and its largest bucket.

    Example:
        >>> peak_sentence("small, 128 tokens", summary)                              # doctest: +SKIP
        'small, 128 tokens: the peak of 1.98 GiB is reached in the backward pass (backward of model.norm); …'
    """
    largest = max(summary.buckets, key=lambda kind: summary.buckets[kind])
    share = summary.buckets[largest] / summary.peak_bytes if summary.peak_bytes else 0.0
    when = f" {RunPhase(summary.phase).describe()}" if summary.phase else ""
    where = f" ({summary.module})" if summary.module not in ("", "backward") else ""
    text = (
        f"{name}: the peak of {format_bytes(summary.peak_bytes)} is reached{when}{where}; the largest bucket is "
        f"{_BUCKETS[largest]}, {share:.0%} of it."
    ).replace("%", " %")
    if summary.parts:
        part = max(summary.parts, key=lambda role: summary.parts[role])
        text += f" The largest part of the activations is {part} ({format_bytes(summary.parts[part])})."
    return text


_BUCKETS = {
    TensorKind.WEIGHTS.value: "weights",
    TensorKind.GRADIENTS.value: "gradients",
    TensorKind.OPTIMIZER.value: "optimizer states",
    TensorKind.ACTIVATIONS.value: "activations",
    TensorKind.OTHER.value: "other tensors",
}
