"""Tables and charts of one group: times, speed-ups, memory before backward. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable

from trimtab.lab.studies.attention.crossover import EAGER_PLAIN, crossover, speed_up
from trimtab.lab.studies.attention.formula import is_quadratic
from trimtab.lab.studies.attention.readings import Group, Reading, Readings, Variant
from trimtab.lab.studies.attention.results import AttentionResult
from trimtab.lab.study import CellOutcome
from trimtab.report.document import LineChart, Series, Table

MIB = 2**20
CHARTED_HEAD_DIM = 64
"""Head dimension of the charts, if it was measured; otherwise the largest one."""
NOTHING = "–"


def format_ms(ms: float) -> str:
    """Milliseconds, or any other quantity, with three significant digits.

    Example:
        >>> format_ms(0.01234), format_ms(1.234), format_ms(12.34), format_ms(1234.5)
        ('0.0123', '1.23', '12.3', '1234')
    """
    digits = 4 if ms < 0.1 else 3 if ms < 1 else 2 if ms < 10 else 1 if ms < 100 else 0
    return f"{ms:.{digits}f}"


def format_mib(nbytes: float) -> str:
    """
    Example:
        >>> format_mib(3 * 2**18), format_mib(3 * 2**19), format_mib(5 * 2**30)
        ('0.750', '1.50', '5120')
    """
    return format_ms(nbytes / MIB)


def times_table(readings: Readings, group: Group) -> Table:
    """Forward / backward, a row per head dimension and length, a column per variant."""
    counts = [
        samples.repetitions
        for reading in readings.all
        if reading.group == group and reading.result is not None
        for samples in (reading.result.times.forward, reading.result.times.backward)
    ]
    repetitions = (
        f"{min(counts)} to {max(counts)}"
        if counts and min(counts) < max(counts)
        else f"{max(counts, default=0)}"
    )
    return _table(
        readings,
        group,
        "forward / backward, ms",
        lambda result: (
            f"{format_ms(result.times.forward.median_ms)} / {format_ms(result.times.backward.median_ms)}"
        ),
        f"Medians of {repetitions} repetitions. The records have every time, mean and standard deviation.",
    )


def memory_table(readings: Readings, group: Group) -> Table:
    """MiB before backward, a row per head dimension and length, a column per variant."""
    return _table(
        readings,
        group,
        "allocated before backward, MiB",
        lambda result: format_mib(result.before_backward_bytes),
        "q, k, v, the output and what forward saved for backward.",
    )


def _table(
    readings: Readings, group: Group, title: str, show: Callable[[AttentionResult], str], note: str
) -> Table:
    variants = readings.variants(group)
    rows = tuple(
        (
            str(head_dim),
            str(length),
            *(_shown(readings.find(group, length, head_dim, variant), show) for variant in variants),
        )
        for head_dim in readings.head_dims(group)
        for length in readings.lengths(group)
    )
    return Table(f"{group.title}: {title}", ("head dim", "length", *map(str, variants)), rows, note)


def _shown(reading: Reading | None, show: Callable[[AttentionResult], str]) -> str:
    if reading is None:
        return NOTHING
    return reading.outcome.value if reading.result is None else show(reading.result)


def flash_variants(readings: Readings, group: Group) -> list[Variant]:
    """Variants that never store the matrix of scores."""
    return [variant for variant in readings.variants(group) if not is_quadratic(variant.backend)]


def speed_up_table(readings: Readings, group: Group) -> Table | None:
    """Plain attention's time divided by that of each FlashAttention, by length; None where none can be compared."""
    lengths, variants = readings.lengths(group), flash_variants(readings, group)
    rows = []
    for variant in variants:
        for head_dim in readings.head_dims(group):
            ratios = [speed_up(readings, group, length, head_dim, variant) for length in lengths]
            if any(ratio is not None for ratio in ratios):
                shown = [
                    _ratio(readings, group, head_dim, length, r)
                    for length, r in zip(lengths, ratios, strict=True)
                ]
                start = crossover(readings, group, head_dim, variant).faster_from
                rows.append((str(variant), str(head_dim), *shown, NOTHING if start is None else f"{start}"))
    if not rows:
        return None
    head = ("backend", "head dim", *(str(length) for length in lengths), "faster from")
    return Table(f"{group.title}: speed-up over plain attention, forward + backward", head, tuple(rows))


def _ratio(readings: Readings, group: Group, head_dim: int, length: int, ratio: float | None) -> str:
    if ratio is not None:
        return f"{ratio:.2f}×"
    plain = readings.find(group, length, head_dim, EAGER_PLAIN)
    stopped = plain is not None and plain.outcome in (
        CellOutcome.OUT_OF_MEMORY,
        CellOutcome.PREDICTED_OUT_OF_MEMORY,
    )
    return f"plain: {plain.outcome.value}" if plain is not None and stopped else NOTHING


def charts(readings: Readings, group: Group) -> list[LineChart]:
    """Charts of time and memory over length on logarithmic axes, at one head dimension."""
    head_dims = readings.head_dims(group)
    head_dim = CHARTED_HEAD_DIM if CHARTED_HEAD_DIM in head_dims else head_dims[-1]
    if len(readings.lengths(group)) < 2:
        return []

    def chart(kind: str, title: str, unit: str, value: Callable[[AttentionResult], float]) -> LineChart:
        return LineChart(
            f"attention-{kind}-{group.slug}-d{head_dim}",
            f"{title}: {group.title}, head dim {head_dim}",
            "length, tokens",
            unit,
            _series(readings, group, head_dim, value),
            log_x=True,
            log_y=True,
            note="A curve ends where its backend runs out of memory, or at the longest requested length.",
        )

    return [
        chart("time", "Forward + backward", "ms", lambda result: result.times.total_ms),
        chart(
            "memory", "Allocated before backward", "bytes", lambda result: float(result.before_backward_bytes)
        ),
    ]


def _series(
    readings: Readings, group: Group, head_dim: int, value: Callable[[AttentionResult], float]
) -> tuple[Series, ...]:
    series = []
    for variant in readings.variants(group):
        points = []
        for length in readings.lengths(group):
            result = readings.result(group, length, head_dim, variant)
            points.append((float(length), None if result is None else value(result)))
        if any(y is not None for _, y in points):
            series.append(Series(str(variant), tuple(points)))
    return tuple(series)
