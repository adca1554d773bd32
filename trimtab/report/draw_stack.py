"""Draws stacked step areas, such as memory over time, as SVG, with the data that the zoom script needs.

A stack can have tens of thousands of moments (points in time). Of each interval the page contains the minimum, the
maximum, the longest and the last moment, so that the peak is exact; the static SVG contains fewer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.report.axes import BYTES, Axis, format_number, format_value, quantity_of, unit_of
from trimtab.report.document import StackChart
from trimtab.report.draw_lines import spread_ticks
from trimtab.report.drawing import HEIGHT, MAX_MAGNITUDE, WIDTH, Tick, tick_at
from trimtab.report.plain import plain
from trimtab.report.roles import named_roles

MAX_MOMENTS = 20_000
"""Maximum number of moments in the data of the zoom script."""
DRAWN_MOMENTS = 1_200
"""Maximum number of moments in the static SVG."""
GRID = 10_000_000
"""Number of steps into which non-integer values are quantized for the script."""
AXIS_HEADROOM = 1.06
"""Maximum of the axis relative to the peak."""
WIDE_PLOT, NARROW_PLOT, LETTER = 800, 290, 7
"""Width in pixels of a plot on a wide screen and on a phone, and of a letter of its labels."""
MAX_SHOWN_LIMIT = 1.6
"""A limit above this multiple of the peak is not drawn."""


@dataclass(frozen=True)
class DrawnBand:
    """One band: its name, CSS class and closed path, and its value at the peak."""

    name: str
    role: str
    path: str
    """From the upper edge of the band down to the axis: bands are painted from top to bottom."""
    peak: str


@dataclass(frozen=True)
class DrawnPhase:
    """A phase: the position of its label in percent, and its start in viewBox units."""

    name: str
    percent: float
    place: int
    shown: str
    """CSS class of its label: empty, `wide` (wide screens only), or `never` if it does not fit."""


@dataclass(frozen=True)
class DrawnStack:
    """A stack in the form that the template renders."""

    id: str
    bands: list[DrawnBand]
    """Bands from bottom to top."""
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    phases: list[DrawnPhase]
    limit: int | None
    """Position of the dashed line in viewBox units; None without a limit or if it is far above the peak."""
    limit_label: str
    x_label: str
    y_label: str
    label: str
    """Text description of the chart."""
    figure: dict[str, Any]
    """The data of the zoom script."""


@dataclass(frozen=True)
class Stack:
    """The values of a chart, with negative and non-finite values replaced, and the end after the last moment."""

    x: list[float]
    end: float
    values: list[list[float]]
    """Values of each band, from bottom to top."""
    tops: list[float]
    """Sums of all bands."""
    peak: int
    """Index of the largest sum."""


def read_stack(chart: StackChart) -> Stack | None:
    """Reads the values of a chart; returns None if none is positive."""
    values = [[_clean(value) for value in band.values] for band in chart.bands]
    assert all(len(band) == len(chart.x) for band in values), f"{chart.id}: a band has another length than x"
    tops = [sum(column) for column in zip(*values, strict=True)]
    if not tops or max(tops) <= 0:
        return None
    x = [float(value) for value in chart.x]
    widths = [high - low for low, high in itertools.pairwise(x)]
    end = chart.end if chart.end > x[-1] else x[-1] + (max(widths, default=1.0) or 1.0)
    return Stack(x, float(end), values, tops, max(range(len(tops)), key=tops.__getitem__))


def _clean(value: float) -> float:
    # The sum of a thousand bands of the largest value is still finite.
    return min(max(float(value), 0.0), MAX_MAGNITUDE / 1000) if math.isfinite(value) else 0.0


def thin_moments(stack: Stack, most: int, keep: Sequence[float] = ()) -> list[int]:
    """Selects the indices of about `most` moments: minimum, maximum, longest and last of each interval.

    Args:
        stack: the values.
        most: number of moments, at least 8.
        keep: x values whose moments are always selected, such as the starts of phases.
    """
    count = len(stack.x)
    if count <= most:
        return list(range(count))
    lasts = [high - low for low, high in zip(stack.x, [*stack.x[1:], stack.end], strict=True)]
    kept = {0, stack.peak} | {max(range(count), key=band.__getitem__) for band in stack.values}
    starts = set(keep)
    kept |= {i for i, value in enumerate(stack.x) if value in starts}
    stretch = -(-4 * count // most)
    for start in range(0, count, stretch):
        part = range(start, min(start + stretch, count))
        least, greatest = min(part, key=stack.tops.__getitem__), max(part, key=stack.tops.__getitem__)
        kept |= {least, greatest, max(part, key=lasts.__getitem__), part[-1]}
    return sorted(kept)


def draw_stack(
    chart: StackChart, *, most: int = MAX_MOMENTS, drawn: int = DRAWN_MOMENTS
) -> DrawnStack | None:
    """Draws a stack; returns None if no value is positive.

    Args:
        chart: the chart.
        most: number of moments in the data of the script.
        drawn: number of moments in the static SVG.
    """
    stack = read_stack(chart)
    if stack is None:
        return None
    limit = chart.limit if chart.limit and chart.limit <= MAX_SHOWN_LIMIT * max(stack.tops) else None
    y = Axis(0, AXIS_HEADROOM * max(*stack.tops, limit or 0.0), unit=chart.unit)
    x = Axis(stack.x[0], stack.end)
    starts = [phase.start for phase in chart.phases]
    roles = named_roles([band.role for band in chart.bands])
    shown = thin_moments(stack, drawn, starts)
    below = [0.0] * len(stack.x)
    bands = []
    for band, role, values in zip(chart.bands, roles, stack.values, strict=True):
        below = [low + value for low, value in zip(below, values, strict=True)]
        path = _path([(x.share(stack.x[i]), y.share(below[i])) for i in shown])
        bands.append(DrawnBand(_name(band.name), role, path, format_value(values[stack.peak], chart.unit)))
    moment = _name(moment_title(chart, stack.x, stack.peak))
    return DrawnStack(
        chart.id,
        bands,
        spread_ticks([(format_number(v), x.share(v)) for v in x.ticks(8)]) if chart.x_label else [],
        [tick_at(y.tick_label(v), 1 - y.share(v), HEIGHT) for v in y.ticks(6)],
        _phases(chart, x),
        round(HEIGHT * (1 - y.share(limit))) if limit else None,
        chart.limit_label or (f"limit {format_value(limit, chart.unit)}" if limit else ""),
        chart.x_label,
        "" if chart.unit == BYTES else chart.unit,
        f"{chart.title}: peak {format_value(stack.tops[stack.peak], chart.unit)}, at {moment}",
        _figure(chart, stack, thin_moments(stack, most, starts), bands, limit),
    )


def moment_title(chart: StackChart, x: Sequence[float], index: int) -> str:
    """Returns the title of a moment, or its x value if it has no title.

    Example:
        >>> moment_title(StackChart("a", "A", "time, ms", "bytes", (0.0, 2.5), 3.0, ()), (0.0, 2.5), 1)
        'time 2.5 ms'
    """
    if chart.titles:
        return chart.titles[index]
    return f"{quantity_of(chart.x_label)} {format_value(x[index], unit_of(chart.x_label))}".strip()


def _name(text: str) -> str:
    return plain(text, keep_newlines=False)


def _path(points: Sequence[tuple[float, float]]) -> str:
    """Returns a closed step path: each value extends to the next x, and the path closes at the axis."""
    found, at, level = [], 0, HEIGHT
    for share, height in points:
        place, top = round(WIDTH * share), round(HEIGHT * (1 - height))
        if top != level:
            found.append(f"h{place - at}v{top - level}" if place > at else f"v{top - level}")
            at, level = place, top
    return f"M0,{HEIGHT}{''.join(found)}H{WIDTH}V{HEIGHT}Z"


def _phases(chart: StackChart, x: Axis) -> list[DrawnPhase]:
    spans = [(max(x.share(phase.start), 0.0), min(x.share(phase.end), 1.0)) for phase in chart.phases]
    names = [_name(phase.name) for phase in chart.phases]
    wide, narrow = (labelled_phases(names, spans, pixels) for pixels in (WIDE_PLOT, NARROW_PLOT))
    found = []
    for i, (name, (low, high)) in enumerate(zip(names, spans, strict=True)):
        shown = "" if i in narrow else "wide" if i in wide else "never"
        if low < high:
            found.append(DrawnPhase(name, round(50 * (low + high), 2), round(WIDTH * low), shown))
    return found


def labelled_phases(names: Sequence[str], spans: Sequence[tuple[float, float]], pixels: int) -> set[int]:
    """Selects the phases whose names fit below a plot of this width without overlap; longer phases have priority.

    Example:
        >>> sorted(labelled_phases(["forward", "loss", "backward"], [(0, 0.4), (0.4, 0.41), (0.41, 1)], 800))
        [0, 1, 2]
        >>> sorted(labelled_phases(["a long name", "b"], [(0, 0.1), (0.1, 0.2)], 100))
        [1]
    """
    taken: dict[int, tuple[float, float]] = {}
    for i in sorted(range(len(spans)), key=lambda i: spans[i][0] - spans[i][1]):
        low, high = spans[i]
        middle, half = (low + high) / 2, LETTER * (len(names[i]) + 1) / pixels / 2
        inside = half <= middle <= 1 - half and low < high
        if inside and all(middle + half <= left or right <= middle - half for left, right in taken.values()):
            taken[i] = (middle - half, middle + half)
    return set(taken)


def _figure(
    chart: StackChart, stack: Stack, kept: list[int], bands: Sequence[DrawnBand], limit: float | None
) -> dict[str, Any]:
    """Encodes the selected moments as small integers: steps on x and changes of each band, mostly 0."""
    start = stack.x[0]
    dx = _grid([value - start for value in [*stack.x, stack.end]])
    dy = 1.0 if chart.unit == BYTES else _grid(stack.tops)
    titles = [_name(chart.titles[i]) for i in kept] if chart.titles else []
    names = {title: i for i, title in enumerate(dict.fromkeys(titles))}
    return {
        "start": start,
        "dx": dx,
        "x": _changes([(stack.x[i] - start) / dx for i in kept]),
        "end": round((stack.end - start) / dx),
        "dy": dy,
        "unit": chart.unit,
        "bands": [
            {"name": band.name, "role": band.role, "values": _changes([values[i] / dy for i in kept])}
            for band, values in zip(bands, stack.values, strict=True)
        ],
        "peak": kept.index(stack.peak),
        "titles": list(names),
        "title": _changes([names[title] for title in titles]),
        "place": quantity_of(chart.x_label),
        "place_unit": unit_of(chart.x_label),
        "phases": [[_name(phase.name), phase.start, phase.end] for phase in chart.phases],
        "limit": limit,
    }


def _grid(values: Sequence[float]) -> float:
    """Returns the step to which values are rounded: 1 for integers."""
    greatest = max(values)
    if greatest <= 2**52 and all(value == round(value) for value in values):
        return 1.0
    return greatest / GRID


def _changes(values: Sequence[float]) -> list[int]:
    whole = [round(value) for value in values]
    return [high - low for low, high in zip([0, *whole], whole, strict=False)]
