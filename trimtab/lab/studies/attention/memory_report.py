"""The report's part on memory: the formula against measurements, and the lengths that fit. Imports no torch."""

from __future__ import annotations

from trimtab.facts.units import format_bytes
from trimtab.lab.studies.attention.formula import (
    before_backward,
    bytes_per_score,
    is_quadratic,
    longest_length,
)
from trimtab.lab.studies.attention.readings import Group, Reading, Readings, Variant
from trimtab.lab.studies.attention.results import AttentionResult
from trimtab.lab.studies.attention.settings import AttentionSettings, Mode, Visibility
from trimtab.lab.studies.attention.tables import NOTHING, format_mib
from trimtab.lab.study import CellOutcome
from trimtab.report.document import Block, Section, Table, Text

FORMULA = (
    "Plain attention saves the probabilities for backward: one element for each pair of query and key, B · H · N² of "
    "them for B sequences, H heads and N tokens. The softmax is in fp32, so that each takes {fp32} bytes in fp32 and "
    "{bf16} bytes in bf16 or fp16, where the rounded copy that multiplies v is saved too; a causal mask adds N² bytes. "
    "Everything else grows with N. A tiled backend (FlashAttention) saves one element per query instead of N, and "
    "recomputes the scores in backward."
)


def memory_section(readings: Readings) -> Section | None:
    """Predicted and measured memory before backward; None where nothing was measured."""
    rows = [
        row
        for group in readings.groups
        for variant in readings.variants(group)
        if (row := _formula_row(readings, group, variant)) is not None
    ]
    if not rows:
        return None
    text = FORMULA.format(
        fp32=bytes_per_score("reference", "fp32"), bf16=bytes_per_score("reference", "bf16")
    )
    table = Table(
        "Before backward at the longest measured length",
        ("settings", "backend", "head dim", "length", "formula, MiB", "share of N²", "measured, MiB",
         "measured / formula", "growth by the last doubling"),
        tuple(rows),
        "A growth of 4 is quadratic, one of 2 linear. torch.compile chooses what to save: there is no formula.",
    )  # fmt: skip
    return Section("Memory before backward, by the formula and measured", (Text(text), table))


def _formula_row(readings: Readings, group: Group, variant: Variant) -> tuple[str, ...] | None:
    """The row of the longest measured length, at its largest head dimension."""
    candidates = [
        reading
        for reading in readings.all
        if reading.group == group and reading.variant == variant and reading.result is not None
    ]
    if not candidates:
        return None
    last = max(candidates, key=lambda reading: (reading.settings.length, reading.settings.head_dim))
    s, result = last.settings, last.result
    assert result is not None
    measured, predicted = result.before_backward_bytes, before_backward(s)
    half = readings.result(group, s.length // 2, s.head_dim, variant)
    formula = (NOTHING,) * 2
    ratio = NOTHING
    if predicted is not None:
        formula = (format_mib(predicted.total), f"{predicted.quadratic / predicted.total:.0%}")
        ratio = f"{measured / predicted.total:.3f}"
    growth = NOTHING if half is None else f"{measured / half.before_backward_bytes:.2f}×"
    return (
        group.title, str(variant), str(s.head_dim), str(s.length), *formula, format_mib(measured), ratio, growth,
    )  # fmt: skip


def limits_section(readings: Readings) -> Section | None:
    """The length at which each backend runs out of memory; None where nothing was measured."""
    usable = min(
        (reading.result.usable_bytes for reading in readings.all if reading.result is not None), default=None
    )
    if usable is None:
        return None
    rows = tuple(
        row
        for group in readings.groups
        for variant in readings.variants(group)
        for row in _limit_rows(readings, group, variant, usable)
    )
    blocks: list[Block] = [Text(_limits_text(readings, usable))]
    blocks.append(
        Table(
            "Lengths that fit",
            ("settings", "backend", "head dims", "longest measured", "out of memory, measured",
             "out of memory, predicted", "longest by the formula"),
            rows,
            "Longest by the formula: where the memory before backward alone fills the device. Backward needs more, so "
            "that memory runs out at a shorter length. Compiled: where one matrix of scores fills it.",
        )
    )  # fmt: skip
    return Section("Where memory runs out", tuple(blocks))


def _limit_rows(
    readings: Readings, group: Group, variant: Variant, usable_bytes: int
) -> list[tuple[str, ...]]:
    """One row for all head dimensions with the same outcome."""
    head_dims_by_outcome: dict[tuple[str, str, str], list[int]] = {}
    for head_dim in readings.head_dims(group):
        ends: dict[CellOutcome, list[int]] = {}
        for length in readings.lengths(group):
            reading = readings.find(group, length, head_dim, variant)
            if reading is not None:
                ends.setdefault(reading.outcome, []).append(length)
        measured = ends.get(CellOutcome.MEASURED)
        key = (
            str(max(measured)) if measured else NOTHING,
            _first(ends.get(CellOutcome.OUT_OF_MEMORY)),
            _first(ends.get(CellOutcome.PREDICTED_OUT_OF_MEMORY)),
        )
        head_dims_by_outcome.setdefault(key, []).append(head_dim)
    return [
        (
            group.title,
            str(variant),
            ", ".join(map(str, head_dims)),
            *key,
            _longest(group, variant, head_dims, usable_bytes),
        )
        for key, head_dims in head_dims_by_outcome.items()
    ]


def _first(lengths: list[int] | None) -> str:
    return f"from {min(lengths)}" if lengths else NOTHING


def _longest(group: Group, variant: Variant, head_dims: list[int], usable_bytes: int) -> str:
    """The longest lengths by the formula, over the head dimensions."""
    mode = Mode.COMPILED if variant.compiled else Mode.EAGER
    lengths = sorted(
        {
            longest_length(
                AttentionSettings(
                    variant.backend, mode, group.dtype, group.batch, group.heads, head_dim,
                    visibility=Visibility(group.visibility),
                ),
                usable_bytes,
            )
            for head_dim in head_dims
        }
    )  # fmt: skip
    return f"{lengths[0]:,}" if len(lengths) == 1 else f"{lengths[0]:,} to {lengths[-1]:,}"


def _limits_text(readings: Readings, usable_bytes: int) -> str:
    stopped = [reading for reading in readings.all if reading.outcome is CellOutcome.OUT_OF_MEMORY]
    predicted = [
        reading for reading in readings.all if reading.outcome is CellOutcome.PREDICTED_OUT_OF_MEMORY
    ]
    measured = [reading.settings.length for reading in readings.all if reading.result is not None]
    sentences = [f"A cell could allocate {format_bytes(usable_bytes)}."]
    if not stopped and not predicted:
        sentences.append(f"Nothing ran out of memory up to {max(measured)} tokens.")
    if stopped:
        sentences.append(_stopped_text(stopped))
    if predicted:
        sentences.append(
            f"Not tried, because the formula alone exceeds the device's memory: {len(predicted)} of "
            f"{len(readings.all)} cells. They are predicted, not measured; --oversized tries them."
        )
    flash = [
        reading.result.peak_bytes  # type: ignore[union-attr]
        for reading in readings.all
        if _is_longest_flash(reading, max(measured))
    ]
    if flash:
        sentences.append(
            f"At {max(measured)} tokens the tiled backends had at most {format_bytes(max(flash))} allocated in both "
            "passes together."
        )
    return " ".join(sentences)


def _stopped_text(stopped: list[Reading]) -> str:
    first = min(stopped, key=lambda reading: (reading.settings.length, reading.settings.batch))
    s, predicted = first.settings, before_backward(first.settings)
    needs = f", where the formula gives {format_bytes(predicted.total)} before backward" if predicted else ""
    return f"The first to run out was {first.variant} at {s.length} tokens ({first.group.title}){needs}."


def _is_longest_flash(reading: Reading, length: int) -> bool:
    result: AttentionResult | None = reading.result
    return (
        result is not None
        and reading.settings.length == length
        and not is_quadratic(reading.settings.backend)
    )
