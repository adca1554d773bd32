"""The effect of a warm-up, measured in fresh processes. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.lab.step_settings import TimedPart
from trimtab.lab.studies import reference_figures as reference
from trimtab.lab.studies.step.entries import NOTHING, Entry, digits_of, grouped, mean_and_deviation, percent
from trimtab.lab.studies.step.tables import is_reference
from trimtab.report.document import Block, Section, Table, Text

SAME_MEAN = 0.05
"""Relative difference below which a mean counts as equal to that of the longest warm-up."""


def warm_up_section(entries: Sequence[Entry]) -> Section | None:
    """Mean and deviation by the number of warm-up steps, each in a fresh process; None without such cells."""
    if not entries:
        return None
    blocks: list[Block] = []
    for (group, (size, context), (part, loss)), same in grouped(
        entries, lambda e: (e.group, e.row, e.column)
    ).items():
        ordered = sorted(same, key=lambda e: e.timed.warm_up)
        matches = (
            is_reference(group)
            and (size, context) == (reference.WARM_UP_SIZE, reference.WARM_UP_CONTEXT)
            and part is TimedPart.FORWARD_BACKWARD
        )
        title = f"{part.label.capitalize()} of {size} at {context} tokens ({group.name}, {loss.label})"
        blocks += [Text(_warm_up_text(ordered)), _warm_up_table(title, ordered, matches)]
    return Section("Warm-up", tuple(blocks))


def _warm_up_table(title: str, entries: Sequence[Entry], matches: bool) -> Table:
    head = ["warm-up steps", "mean ± std, ms", "median, ms", "first step of the process, ms"]
    if matches:
        head += [f"mean ± std, {reference.LABEL}", f"first step, {reference.LABEL}"]
    rows = []
    for entry in entries:
        if entry.result is None:
            cells = [entry.outcome.value, NOTHING, NOTHING]
        else:
            host, first = entry.result.times.host, entry.result.times.first_ms
            median = f"{host.median_ms:.{digits_of(host.median_ms)}f}"
            cells = [mean_and_deviation(host), median, f"{first:.{digits_of(first)}f}"]
        if matches:
            cells += _reference_warm_up(entry.timed.warm_up)
        rows.append((str(entry.timed.warm_up), *cells))
    reasons = [f"{e.outcome.value}: {e.message}" for e in entries if e.result is None]
    note = " ".join(["Each row is a separate process.", *dict.fromkeys(reasons)])
    return Table(title, tuple(head), tuple(rows), note)


def _reference_warm_up(steps: int) -> list[str]:
    known = reference.WARM_UP.get(steps)
    if known is None:
        return [NOTHING, NOTHING]
    deviation = "" if known.std_ms is None else f" ± {known.std_ms:.1f}"
    first = NOTHING if known.first_ms is None else f"{known.first_ms:.0f}"
    return [f"{known.mean_ms:.1f}{deviation}", first]


def _warm_up_text(entries: Sequence[Entry]) -> str:
    """The cost of having no warm-up, and the number of steps that suffices."""
    timed = [e for e in entries if e.result]
    if not timed:
        return "No process completed its timed steps."
    last = timed[-1]
    assert last.result is not None
    warm = last.result.times.host
    sentences = []
    for entry in timed:
        assert entry.result is not None
        host, first = entry.result.times.host, entry.result.times.first_ms
        if entry.timed.warm_up == 0:
            sentences.append(
                f"Without a warm-up the first step takes {first / host.median_ms:.1f} times the median of its process. "
                f"The mean then is {mean_and_deviation(host)} ms, {host.mean_ms / warm.mean_ms:.2f} times that "
                f"after {last.timed.warm_up} steps of warm-up."
                if last is not entry
                else f"The first step takes {first / host.median_ms:.1f} times the median of its process."
            )
    enough = next(
        (e.timed.warm_up for e in timed if e.result and _is_warm(e.result.times.host.mean_ms, warm.mean_ms)),
        None,
    )  # fmt: skip
    if enough is not None and len(timed) > 1 and enough < last.timed.warm_up:
        sentences.append(
            f"From {enough} warm-up steps on, the mean is within {percent(SAME_MEAN)} of that after "
            f"{last.timed.warm_up} steps."
        )
    return (
        " ".join(sentences) or f"After {last.timed.warm_up} steps the mean is {mean_and_deviation(warm)} ms."
    )


def _is_warm(mean_ms: float, warm_ms: float) -> bool:
    return abs(mean_ms / warm_ms - 1) <= SAME_MEAN
