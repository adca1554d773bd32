"""Draws bar charts of a document as SVG: one row per bar, parts stacked from the left."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trimtab.report.axes import format_value
from trimtab.report.document import Bar, BarChart
from trimtab.report.plain import plain
from trimtab.report.roles import named_roles

FULL = 1000
"""Length of the longest bar in viewBox units."""


@dataclass(frozen=True)
class DrawnPart:
    """A part of a bar: its CSS class, its start and width in viewBox units, and its value."""

    name: str
    role: str
    start: float
    width: float
    value: str


@dataclass(frozen=True)
class DrawnBar:
    """A bar with its name and label."""

    name: str
    parts: list[DrawnPart]
    label: str


@dataclass(frozen=True)
class DrawnBars:
    """A bar chart in the form that the template renders."""

    id: str
    legend: list[tuple[str, str]]
    """(name, class) of each part; empty if there is only one."""
    bars: list[DrawnBar]


def part_names(chart: BarChart) -> list[str]:
    """Returns the distinct part names of all bars, in order of appearance."""
    return list(dict.fromkeys(name for bar in chart.bars for name, _ in bar.parts))


def part_value(value: float) -> float:
    """Clamps a value for drawing: negative and non-finite values become 0."""
    return max(value, 0.0) if math.isfinite(value) else 0.0


def scale(chart: BarChart) -> float:
    """Returns the value of the longest bar, or 1 if all bars are empty."""
    return max((sum(part_value(value) for _, value in bar.parts) for bar in chart.bars), default=0.0) or 1.0


def draw_bars(chart: BarChart) -> DrawnBars | None:
    """Draws a bar chart; returns None without bars.

    Example:
        >>> bars = (Bar("a", (("x", 3.0), ("y", 1.0)), "4 ms"), Bar("b", (("x", 2.0),), "2 ms"))
        >>> [part.width for part in draw_bars(BarChart("c", "C", "ms", bars)).bars[0].parts]
        [750.0, 250.0]
    """
    if not chart.bars:
        return None
    names = part_names(chart)
    roles = dict(zip(names, named_roles(names), strict=True))
    whole = scale(chart)
    legend = [(plain(name, keep_newlines=False), roles[name]) for name in names] if len(names) > 1 else []
    return DrawnBars(chart.id, legend, [_bar(bar, roles, whole, chart.unit) for bar in chart.bars])


def _bar(bar: Bar, roles: dict[str, str], whole: float, unit: str) -> DrawnBar:
    start, parts = 0.0, []
    for name, value in bar.parts:
        width = FULL * (part_value(value) / whole)
        parts.append(
            DrawnPart(name, roles[name], round(start, 2), round(width, 2), format_value(value, unit))
        )
        start += width
    return DrawnBar(bar.name, parts, bar.label)
