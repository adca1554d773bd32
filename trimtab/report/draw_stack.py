"""Stacked areas in steps, as memory over time: the picture of a page, and what its script needs to zoom.

A stack may have tens of thousands of moments. The page keeps the least, the greatest, the longest and the last of each
stretch, so that the peak is exact; the picture that needs no script keeps fewer of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.report.axes import BYTES, Axis, quantity_of, show, show_number, unit_of
from trimtab.report.document import StackChart
from trimtab.report.draw_lines import spread_ticks
from trimtab.report.drawing import HEIGHT, LARGEST, WIDTH, Tick, tick_at
from trimtab.report.plain import plain
from trimtab.report.roles import named_roles

MOST_MOMENTS = 20_000
"""Moments that the page keeps for its script."""
DRAWN_MOMENTS = 1_200
"""Moments of the picture that is there without a script."""
GRID = 10_000_000
"""Steps into which a range of values that are not whole is divided for the script."""
ROOM = 1.06
"""The greatest value of the axis, relative to the peak."""
WIDE_PLOT, NARROW_PLOT, LETTER = 800, 290, 7
"""Pixels of a plot on a wide screen and on a phone, and of a letter below it."""
LIMIT_SHOWN = 1.6
"""A limit further above the peak than this is not drawn."""


@dataclass(frozen=True)
class DrawnBand:
    """One band: its name, class and closed path, and its value at the peak."""

    name: str
    role: str
    path: str
    """From its upper edge down to the axis: bands are painted from the top one to the lowest."""
    peak: str


@dataclass(frozen=True)
class DrawnPhase:
    """A phase: where its label stands in percent, and where it begins in units of the viewBox."""

    name: str
    percent: float
    place: int
    shown: str
    """Class of its label: empty, `wide` for wide screens alone, or `never` where it has no room."""


@dataclass(frozen=True)
class DrawnStack:
    """Everything a template needs to draw a stack."""

    id: str
    bands: list[DrawnBand]
    """From the lowest to the top one."""
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    phases: list[DrawnPhase]
    limit: int | None
    """Where the dashed line is, in units of the viewBox; None where there is none, or far above."""
    limit_label: str
    x_label: str
    y_label: str
    label: str
    """The picture in words."""
    figure: dict[str, Any]
    """For the script: all moments that the page keeps."""


@dataclass(frozen=True)
class Stack:
    """A chart's values, cleaned: nothing below zero or not finite, the end beyond the last moment."""

    x: list[float]
    end: float
    values: list[list[float]]
    """Of each band, from the lowest to the top one."""
    tops: list[float]
    """All bands together."""
    peak: int
    """The moment at which they are largest."""


def read_stack(chart: StackChart) -> Stack | None:
    """The values of a chart; None where there is no moment or nothing above zero."""
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
    # A thousand bands of the largest value are still finite.
    return min(max(float(value), 0.0), LARGEST / 1000) if math.isfinite(value) else 0.0


def thin_moments(stack: Stack, most: int, keep: Sequence[float] = ()) -> list[int]:
    """Indices of about `most` moments: of each stretch the least, the greatest, the longest and the last.

    Args:
        stack: the values.
        most: at least 8.
        keep: places on x whose moments are kept, as the starts of phases.
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
    chart: StackChart, *, most: int = MOST_MOMENTS, drawn: int = DRAWN_MOMENTS
) -> DrawnStack | None:
    """The picture of a stack; None where there is nothing above zero.

    Args:
        chart: what to draw.
        most: moments that the script gets.
        drawn: moments of the picture.
    """
    stack = read_stack(chart)
    if stack is None:
        return None
    limit = chart.limit if chart.limit and chart.limit <= LIMIT_SHOWN * max(stack.tops) else None
    y = Axis(0, ROOM * max(*stack.tops, limit or 0.0), unit=chart.unit)
    x = Axis(stack.x[0], stack.end)
    starts = [phase.start for phase in chart.phases]
    roles = named_roles([band.role for band in chart.bands])
    shown = thin_moments(stack, drawn, starts)
    below = [0.0] * len(stack.x)
    bands = []
    for band, role, values in zip(chart.bands, roles, stack.values, strict=True):
        below = [low + value for low, value in zip(below, values, strict=True)]
        path = _path([(x.share(stack.x[i]), y.share(below[i])) for i in shown])
        bands.append(DrawnBand(_name(band.name), role, path, show(values[stack.peak], chart.unit)))
    moment = _name(moment_title(chart, stack.x, stack.peak))
    return DrawnStack(
        chart.id,
        bands,
        spread_ticks([(show_number(v), x.share(v)) for v in x.ticks(8)]) if chart.x_label else [],
        [tick_at(y.tick_label(v), 1 - y.share(v), HEIGHT) for v in y.ticks(6)],
        _phases(chart, x),
        round(HEIGHT * (1 - y.share(limit))) if limit else None,
        chart.limit_label or (f"limit {show(limit, chart.unit)}" if limit else ""),
        chart.x_label,
        "" if chart.unit == BYTES else chart.unit,
        f"{chart.title}: at most {show(stack.tops[stack.peak], chart.unit)}, at {moment}",
        _figure(chart, stack, thin_moments(stack, most, starts), bands, limit),
    )


def moment_title(chart: StackChart, x: Sequence[float], index: int) -> str:
    """What a moment is called: its title, or its place on x.

    Example:
        >>> moment_title(StackChart("a", "A", "time, ms", "bytes", (0.0, 2.5), 3.0, ()), (0.0, 2.5), 1)
        'time 2.5 ms'
    """
    if chart.titles:
        return chart.titles[index]
    return f"{quantity_of(chart.x_label)} {show(x[index], unit_of(chart.x_label))}".strip()


def _name(text: str) -> str:
    return plain(text, keep_newlines=False)


def _path(points: Sequence[tuple[float, float]]) -> str:
    """A closed path in steps, each value from its place to the next one, then down to the axis."""
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
    """Which phases have room for their names below a plot of this width: the longest first, none over another.

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
    """The kept moments in small whole numbers: steps on x and changes of each band, of which most are 0."""
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
    """The step in which values are rounded: 1 for whole ones."""
    greatest = max(values)
    if greatest <= 2**52 and all(value == round(value) for value in values):
        return 1.0
    return greatest / GRID


def _changes(values: Sequence[float]) -> list[int]:
    whole = [round(value) for value in values]
    return [high - low for low, high in zip([0, *whole], whole, strict=False)]
