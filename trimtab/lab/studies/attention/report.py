"""The report of the attention study: tables, charts and conclusions, computed from the measurements. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.kernels.weighted_sum.spec import bytes_moved
from trimtab.lab.samples import CacheState
from trimtab.lab.studies.attention.compiled_report import compiled_section
from trimtab.lab.studies.attention.crossover import crossover
from trimtab.lab.studies.attention.memory_report import limits_section, memory_section
from trimtab.lab.studies.attention.readings import Group, Readings
from trimtab.lab.studies.attention.results import PassTimes
from trimtab.lab.studies.attention.settings import WeightedSumSettings, is_weighted_sum
from trimtab.lab.studies.attention.tables import (
    NOTHING,
    charts,
    flash_variants,
    format_ms,
    memory_table,
    speed_up_table,
    times_table,
)
from trimtab.lab.study import CellOutcome, Measurement
from trimtab.report.document import Block, Section, Table, Text

CACHES = {
    CacheState.CLEARED: "Before each repetition a buffer larger than the L2 cache is written, so that inputs come from "
    "the GPU's memory; times are from CUDA events, without the host's launches.",
    CacheState.AS_LEFT: "Nothing is evicted from the CPU's caches before a repetition.",
}


def sections(measurements: Sequence[Measurement]) -> list[Section]:
    """Times and memory of each group of settings, then the comparisons."""
    readings = Readings(measurements)
    report_sections: list[Section | None] = []
    if readings.all:
        report_sections.append(_reading_section(readings))
        report_sections += [
            _group_section(readings, group) for group in readings.groups if readings.variants(group)
        ]
        report_sections += [
            _flash_section(readings),
            compiled_section(readings),
            memory_section(readings),
            limits_section(readings),
            _obstacle_section(readings),
        ]
    report_sections.append(
        _weighted_sum_section([m for m in measurements if is_weighted_sum(m.cell.settings)])
    )
    return [section for section in report_sections if section is not None]


def _reading_section(readings: Readings) -> Section:
    caches = list(
        dict.fromkeys(reading.result.times.cache for reading in readings.all if reading.result is not None)
    )
    text = (
        "Forward is one call with gradients enabled. Backward is the gradient of q, k and v; the forward pass that "
        "each repetition of it needs is made outside the timed part. Each backend was first compared with plain "
        "attention in fp64: one with a larger error than plain attention in the same dtype, plus a small "
        "share, gets no time."
    )
    return Section(
        "What was measured",
        tuple(Text(sentence) for sentence in (text, *(CACHES[cache] for cache in caches))),
    )


def _group_section(readings: Readings, group: Group) -> Section:
    blocks: list[Block] = [times_table(readings, group), memory_table(readings, group)]
    fastest = _fastest_text(readings, group)
    if fastest:
        blocks.append(Text(fastest))
    blocks += charts(readings, group)
    return Section(group.title, tuple(blocks))


def _fastest_text(readings: Readings, group: Group) -> str:
    """The fastest variant at each length, over the head dimensions."""
    lengths: dict[str, list[str]] = {}
    for length in readings.lengths(group):
        winners = []
        for head_dim in readings.head_dims(group):
            times = {
                variant: result.times.total_ms
                for variant in readings.variants(group)
                if (result := readings.result(group, length, head_dim, variant)) is not None
            }
            if times:
                winners.append(str(min(times, key=lambda candidate: times[candidate])))
        if winners:
            lengths.setdefault(" or ".join(dict.fromkeys(winners)), []).append(str(length))
    if not lengths:
        return ""
    parts = [f"{names} at {', '.join(where)}" for names, where in lengths.items()]
    return f"Fastest, forward and backward together, by head dimension: {'; '.join(parts)} tokens."


def _flash_section(readings: Readings) -> Section | None:
    """FlashAttention against plain attention: speed-ups and crossover lengths."""
    blocks: list[Block] = []
    for group in readings.groups:
        table = speed_up_table(readings, group)
        if table is None:
            continue
        lines = []
        for variant in flash_variants(readings, group):
            head_dims_by_sentence: dict[str, list[str]] = {}
            for head_dim in readings.head_dims(group):
                comparison = crossover(readings, group, head_dim, variant)
                if comparison.verdicts:
                    head_dims_by_sentence.setdefault(comparison.describe(), []).append(str(head_dim))
            lines += [
                f"{variant}, head dim {', '.join(dims)}: {sentence}."
                for sentence, dims in head_dims_by_sentence.items()
            ]
        blocks += [table, *(Text(line) for line in lines)]
    if not blocks:
        return None
    text = (
        "FlashAttention computes the same result tile by tile and never writes the matrix of scores to memory. It "
        "saves memory traffic, which grows with the square of the length, and recomputes the scores in backward: at "
        "short lengths, where that traffic is small, it may be slower. A length counts as faster or slower "
        "only where the ranges from the first to the third quartile do not overlap; the crossover is the first length "
        "from which on every measured one is faster."
    )
    return Section("FlashAttention against plain attention", (Text(text), *blocks))


def _obstacle_section(readings: Readings) -> Section | None:
    rows = tuple(
        (str(v), dtypes, outcome, reason) for v, dtypes, outcome, reason in readings.unmeasured_cells()
    )
    if not rows:
        return None
    table = Table("", ("backend", "dtypes", "outcome", "reason"), rows)
    return Section("Cells without a time", (table,))


def _weighted_sum_section(measurements: Sequence[Measurement]) -> Section | None:
    """The tutorial's kernel: torch against Triton."""
    if not measurements:
        return None
    rows = []
    for measurement in measurements:
        s = WeightedSumSettings.from_dict(measurement.cell.settings)
        place = (s.impl, s.dtype, f"{s.rows} × {s.columns}")
        if measurement.outcome is not CellOutcome.MEASURED:
            rows.append((*place, measurement.outcome.value, NOTHING, NOTHING))
            continue
        times = PassTimes.from_dict(measurement.result)
        forward, backward = times.forward.median_ms, times.backward.median_ms
        rate = bytes_moved(s.rows, s.columns, s.dtype) / forward / 1e6
        rows.append((*place, format_ms(forward), format_ms(backward), f"{rate:,.1f}"))
    text = (
        "The smallest kernel here, a weighted sum over each row, is the one that docs/writing-a-kernel.md builds step "
        "by step. It reads each element once and computes little, so that memory bandwidth is the limit: GB/s are the "
        "bytes that have to be moved, divided by the time of forward."
    )
    head = (
        "implementation",
        "dtype",
        "rows × columns",
        "forward, ms",
        "backward, ms",
        "forward, GB/s",
    )
    return Section("The weighted sum, torch and Triton", (Text(text), Table("", head, tuple(rows))))
