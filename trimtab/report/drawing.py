"""Draws charts as inline SVG: axes with round ticks, paths in the units of a viewBox that is stretched to any width.

The SVG of the lines is stretched without preserving its aspect ratio, with non-scaling strokes; labels are in separate
SVGs, positioned in percent, and are not stretched. A chart therefore fits every screen without a script, and needs no
style attribute, which the page's Content-Security-Policy forbids.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from trimtab.facts.units import format_count
from trimtab.report.charts import Chart, Line

WIDTH, HEIGHT = 2000, 1000
"""Size of the viewBox; a unit is about half a pixel on a wide screen."""
MAX_MAGNITUDE = 1e307
"""Values of larger magnitude are clamped to this magnitude."""
HEADROOM = 0.04
"""Margin above and below the lines, as a fraction of the range of values."""


@dataclass(frozen=True)
class Tick:
    """A label and its position on the axis, in percent and in viewBox units."""

    label: str
    percent: float
    place: int
    anchor: str = "middle"
    wide: bool = False
    """Whether it is shown only on wide screens."""


@dataclass(frozen=True)
class Stroke:
    """A drawn line: SVG path data of the line and its markers, and the last value for the legend."""

    name: str
    role: str
    path: str
    dots: str
    last: str
    area: str = ""
    """A closed path below the line, which is faintly filled; empty for a line without fill."""


@dataclass(frozen=True)
class Drawing:
    """A chart in the form that the template renders."""

    id: str
    title: str
    large: bool
    strokes: list[Stroke]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    label: str
    """Text description of the chart, for screen readers."""
    figure: dict[str, Any]
    """The data of the hover script: ranges and points, rounded to the displayed precision."""
    x_label: str = ""
    y_label: str = ""


def draw(chart: Chart) -> Drawing | None:
    """Draws a chart; returns None if no value is finite.

    Example:
        >>> draw(Chart("a", "A", [Line("a", "train", [(0, 1.0), (10, 3.0)])], large=True)).strokes[0].path
        'M0,963L2000,37'
    """
    lines = [
        dataclasses.replace(line, points=[(x, _clamped(y)) for x, y in line.points]) for line in chart.lines
    ]
    finite = [(x, y) for line in lines for x, y in line.points if math.isfinite(y)]
    if not finite:
        return None
    x_range = _x_range([x for x, _ in finite])
    y_range = _y_range([y for _, y in finite], from_zero=not chart.large)
    strokes = [_stroke(line, x_range, y_range) for line in lines]
    x_ticks = [
        _tick(_step(v), v, x_range, WIDTH) for v in ticks(*x_range, 8 if chart.large else 4, whole=True)
    ]
    y_ticks = [
        _tick(format_tick(v), v, y_range, HEIGHT, down=True) for v in ticks(*y_range, 6 if chart.large else 3)
    ]
    listed = "; ".join(f"{stroke.name}, last {stroke.last}" for stroke in strokes)
    figure = {
        "x": x_range,
        "y": y_range,
        "lines": [
            {
                "name": line.name,
                "role": line.role,
                "x": [x for x, _ in line.points],
                "y": [float(f"{y:.5g}") if math.isfinite(y) else None for _, y in line.points],
            }
            for line in lines
        ],
    }
    return Drawing(
        chart.id, chart.title, chart.large, strokes, x_ticks, y_ticks, f"{chart.title}: {listed}", figure
    )


def _x_range(values: list[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if low < high else (low - 1, high + 1)


def _y_range(values: list[float], *, from_zero: bool) -> tuple[float, float]:
    low, high = min(values), max(values)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    room = HEADROOM * (high - low) or HEADROOM * abs(high) or 1.0
    return low if from_zero and low == 0 else low - room, high + room


def _clamped(y: float) -> float:
    """Clamps a value so that differences between values are finite."""
    return min(max(y, -MAX_MAGNITUDE), MAX_MAGNITUDE) if math.isfinite(y) else y


def ticks(low: float, high: float, most: int, *, whole: bool = False) -> list[float]:
    """Returns at most `most` + 1 round numbers in a range, spaced by 1, 2 or 5 times a power of ten.

    Example:
        >>> ticks(0.0, 1.0, 5), ticks(0, 3, 8, whole=True)
        ([0.0, 0.2, 0.4, 0.6, 0.8, 1.0], [0.0, 1.0, 2.0, 3.0])
    """
    rough = (high / most - low / most) or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    apart = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    if whole:
        apart = max(1.0, apart)
    first, last = math.ceil(low / apart - 1e-9), math.floor(high / apart + 1e-9)
    digits = max(0, -math.floor(math.log10(apart))) if apart < 1 else 0
    found = (round(i * apart, digits) + 0.0 for i in range(first, last + 1))
    return list(dict.fromkeys(found))[
        : most + 1
    ]  # large values that are close together round to the same float


def _tick(label: str, value: float, span: tuple[float, float], size: int, *, down: bool = False) -> Tick:
    return tick_at(label, position(value, span, down), size)


def tick_at(label: str, share: float, size: int) -> Tick:
    """Returns a tick at a relative position of its axis; labels at the ends are anchored inside.

    Example:
        >>> tick_at("10", 0.5, 2000).place, tick_at("0", 0.0, 2000).anchor
        (1000, 'start')
    """
    anchor = "start" if share < 0.03 else "end" if share > 0.97 else "middle"
    return Tick(label, round(100 * share, 2), round(size * share), anchor)


def position(value: float, span: tuple[float, float], down: bool = False) -> float:
    """Returns the relative position of a value in its range; `down` inverts it for SVG, whose origin is at the top.

    Example:
        >>> position(1.0, (0.0, 4.0)), position(1.0, (0.0, 4.0), down=True)
        (0.25, 0.75)
    """
    low, high = span
    share = (value / 2 - low / 2) / (high / 2 - low / 2)
    return 1 - share if down else share


def _step(value: float) -> str:
    return f"{value:,.0f}" if abs(value) < 100_000 else format_count(value)


def format_tick(value: float) -> str:
    """Formats a value with four digits, for an axis or a legend.

    Example:
        >>> format_tick(1.20304), format_tick(2e-05), format_tick(12_000.0), format_tick(0.0)
        ('1.203', '2e-5', '12 K', '0')
    """
    if abs(value) >= 10_000:
        return format_count(value) if abs(value) < 1e15 else f"{value:.1e}"
    return f"{value:.4g}".replace("e-0", "e-").replace("-", "−", 1 if value < 0 else 0)


def _stroke(line: Line, x_range: tuple[float, float], y_range: tuple[float, float]) -> Stroke:
    path, dots, new = [], [], True
    last = "—"
    for x, y in line.points:
        if not math.isfinite(y):
            new = True
            continue
        place = f"{round(WIDTH * position(x, x_range))},{round(HEIGHT * position(y, y_range, down=True))}"
        path.append(f"{'M' if new else 'L'}{place}")
        dots.append(f"M{place}h0")
        new, last = False, format_tick(y)
    return Stroke(line.name, line.role, "".join(path), "".join(dots) if line.markers else "", last)
