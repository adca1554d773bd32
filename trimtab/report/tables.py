"""Detects numeric columns of tables, and converts charts to tables of their values."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from trimtab.report.axes import Axis, format_number, format_value, unit_of
from trimtab.report.document import BarChart, Chart, Histogram, LineChart, StackChart, Table
from trimtab.report.draw_bars import part_names
from trimtab.report.draw_stack import moment_title, read_stack

NOTHING = ("", "-", "–", "—", "n/a")
FAILURES = ("out of memory", "out of memory (predicted)", "timed out", "failed")
ABSENT = ("not supported", "not measured", *NOTHING)
"""Cell texts that mean that there is no value."""
MAX_ROWS = 24
MAX_COLUMNS = 12
_NUMBER = re.compile(r"[≈~<>≤≥±]?\s*[+\-−]?\s*(\d[\d,.]*|\.\d+|inf\b|nan\b)", re.IGNORECASE)
_LONGEST_NUMBER = 28


def pad_rows(table: Table) -> Table:
    """Pads or truncates every row to the number of columns in the head.

    Example:
        >>> pad_rows(Table("", ("a", "b"), (("1",), ("1", "2", "3")))).rows
        (('1', ''), ('1', '2'))
    """
    width = len(table.head)
    rows = tuple((*row, *("",) * (width - len(row)))[:width] for row in table.rows)
    return dataclasses.replace(table, rows=rows)


def numeric_columns(table: Table) -> list[bool]:
    """Whether each column is right-aligned: all columns after the first whose cells are mostly numbers.

    Example:
        >>> numeric_columns(Table("", ("size", "ms", "why"), (("a", "3.5 ± 0.1", "slow"), ("b", "failed", "fast"))))
        [False, True, False]
    """
    found = [False]
    for i in range(1, len(table.head)):
        cells = [row[i].strip() for row in pad_rows(table).rows]
        values = [cell for cell in cells if cell not in FAILURES and cell not in ABSENT]
        numbers = sum(is_number(cell) for cell in values)
        found.append(2 * numbers >= len(values) if values else bool(cells))
    return found[: len(table.head)]


def is_number(cell: str) -> bool:
    """Whether a cell is a number with or without its unit, and not a sentence that starts with a number.

    Example:
        >>> is_number("1.5 GiB"), is_number("38.3 ± 0.2"), is_number("2 of 3 layers were recompiled")
        (True, True, False)
    """
    return len(cell) <= _LONGEST_NUMBER and _NUMBER.match(cell) is not None


def chart_table(chart: Chart) -> Table | None:
    """Returns the values of a chart, thinned to a readable size; None if it has none."""
    if isinstance(chart, LineChart):
        return _of_lines(chart)
    if isinstance(chart, BarChart):
        return _of_bars(chart)
    if isinstance(chart, StackChart):
        return _of_stack(chart)
    return _of_histogram(chart)


def _of_lines(chart: LineChart) -> Table | None:
    axis = Axis(1, 2, chart.log_x)
    values = [{x: y for x, y in series.points if axis.draws(x)} for series in chart.series]
    places = sorted({x for points in values for x in points})
    if not places:
        return None
    unit = unit_of(chart.y_label)
    kept = evenly(places, MAX_ROWS)
    note = f"{len(kept)} of {len(places):,} points." if len(kept) < len(places) else ""
    named = list(zip([series.name for series in chart.series], values, strict=True))

    def cell(known: dict[float, float | None], x: float) -> str:
        value = known.get(x)
        if value is None:
            return "–"
        return (
            format_value(value, unit) if unit == "bytes" else format_number(value) if value == value else "–"
        )

    if len(named) > MAX_COLUMNS or len(named) > 2 * len(kept):
        columns = evenly(kept, MAX_COLUMNS)
        head = (chart.y_label, *(format_number(x) for x in columns))
        rows = [(name, *(cell(known, x) for x in columns)) for name, known in named]
    else:
        head = (chart.x_label, *(name for name, _ in named))
        rows = [(format_number(x), *(cell(known, x) for _, known in named)) for x in kept]
    return Table(_title(chart.title, chart.y_label), head, tuple(rows), note)


def _title(title: str, unit: str) -> str:
    return f"{title} ({unit})" if unit else title


def _of_bars(chart: BarChart) -> Table | None:
    if not chart.bars:
        return None
    names = part_names(chart)
    shown = names if 1 < len(names) <= MAX_COLUMNS - 2 else []
    rows = []
    for bar in chart.bars[:MAX_ROWS]:
        parts = dict(bar.parts)
        rows.append(
            (bar.name, *(format_value(parts.get(name, 0.0), chart.unit) for name in shown), bar.label)
        )
    hidden = len(chart.bars) - len(rows)
    return Table(
        chart.title, ("", *shown, "total"), tuple(rows), f"{hidden} more are not shown." if hidden else ""
    )


def _of_stack(chart: StackChart) -> Table | None:
    stack = read_stack(chart)
    if stack is None:
        return None
    rows = [
        (band.name, format_value(values[stack.peak], chart.unit), format_value(max(values), chart.unit))
        for band, values in zip(chart.bands, stack.values, strict=True)
    ]
    total = format_value(stack.tops[stack.peak], chart.unit)
    rows = [*reversed(rows), ("total", total, total)]
    peak = moment_title(chart, stack.x, stack.peak)
    return Table(chart.title, ("", "at the peak", "maximum"), tuple(rows), f"The peak is at {peak}.")


def _of_histogram(chart: Histogram) -> Table | None:
    bins = len(chart.edges) - 1
    if bins < 1 or not chart.counts:
        return None
    apart = -(-bins // MAX_ROWS)
    unit = unit_of(chart.x_label)
    rows = []
    for low in range(0, bins, apart):
        high = min(low + apart, bins)
        name = f"{format_value(chart.edges[low], unit)} to {format_value(chart.edges[high], unit)}"
        rows.append((name, *(f"{sum(counts[low:high]):,}" for _, counts in chart.counts)))
    return Table(chart.title, (chart.x_label, *(name for name, _ in chart.counts)), tuple(rows))


def evenly(values: Sequence[float], most: int) -> list[float]:
    """Selects at most `most` evenly spaced values, including the first and the last.

    Example:
        >>> evenly([0, 1, 2, 3, 4], 3)
        [0, 2, 4]
    """
    if len(values) <= most:
        return list(values)
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]
