"""Compares the host's clock with the device's. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.lab.step_settings import TimedPart
from trimtab.lab.studies.step.entries import (
    NOTHING,
    Entry,
    between,
    digits_of,
    grouped,
    percent,
)
from trimtab.report.document import Section, Table, Text


def clocks_section(entries: Sequence[Entry]) -> Section | None:
    """How far the two clocks are apart; None where nothing was timed."""
    gaps = [e.result.times.clock_gap for e in entries if e.result]
    if not gaps:
        return None
    if all(gap is None for gap in gaps):
        return Section("Clocks", (Text(_ONE_CLOCK),))
    rows = []
    parts = [part for part in TimedPart if any(e.timed.part is part for e in entries)]
    for (row, group, loss), same in grouped(
        [e for e in entries if e.result and e.result.times.device],
        lambda e: (e.row, e.group, e.timed.step.loss),
    ).items():
        by_part = {e.timed.part: e for e in same}
        setting = f"{group.name}, {loss.label}"
        rows.append((row[0], str(row[1]), setting, *(_gap(by_part.get(part)) for part in parts)))
    known = [gap for gap in gaps if gap is not None]
    text = (
        f"Each step is timed twice: by CUDA events around it on the device, and by the host's clock between two "
        f"synchronizations. The host's median is {between(known, percent)} above the device's: the launch of the "
        "first kernel and the return from the last wait. A large difference means that steps are short."
    )
    head = ("size", "context", "setting", *(part.label for part in parts))
    note = "Median between CUDA events in ms; in brackets how much more the host's clock shows."
    return Section("Clocks", (Text(text), Table("", head, tuple(rows), note)))


_ONE_CLOCK = (
    "On a CPU the host does the work itself: there is one clock, and nothing to synchronize. On a CUDA GPU this "
    "section compares the host's clock with the device's events."
)


def _gap(entry: Entry | None) -> str:
    if entry is None or entry.result is None or entry.result.times.device is None:
        return NOTHING
    times = entry.result.times
    gap, median = times.clock_gap, times.device.median_ms if times.device else 0.0
    return f"{median:.{digits_of(median)}f} ({100 * (gap or 0.0):+.1f} %)"
