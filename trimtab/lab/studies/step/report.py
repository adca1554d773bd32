"""The report of steps: a section per configuration, comparisons of settings, the two clocks, the warm-up."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.lab.studies.step.clocks import clocks_section
from trimtab.lab.studies.step.comparisons import comparison_sections
from trimtab.lab.studies.step.entries import Entry, Grid, grouped
from trimtab.lab.studies.step.tables import group_section
from trimtab.lab.studies.step.warm_ups import warm_up_section
from trimtab.lab.study import Measurement
from trimtab.report.document import Section


def sections(measurements: Sequence[Measurement]) -> list[Section]:
    """All sections of one machine; cells of a warm-up study have their own.

    Raises:
        DataError: a record is damaged.
    """
    entries = [Entry.of(measurement) for measurement in measurements]
    warm_ups = [entry for entry in entries if entry.timed.fresh]
    steps = [entry for entry in entries if not entry.timed.fresh]
    report_sections: list[Section | None] = [
        group_section(group, Grid(tuple(same))) for group, same in grouped(steps, lambda e: e.group).items()
    ]
    report_sections += comparison_sections(steps)
    report_sections += [clocks_section(steps), warm_up_section(warm_ups)]
    return [section for section in report_sections if section is not None]
