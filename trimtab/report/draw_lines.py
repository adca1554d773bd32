"""Draws line charts and histograms of a document as SVG, with the types of `drawing`."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from trimtab.report.axes import Axis, axis_of, format_number, format_value, quantity_of, spread, unit_of
from trimtab.report.charts import Point, thin_points
from trimtab.report.document import Histogram, LineChart, Series
from trimtab.report.drawing import HEIGHT, WIDTH, Drawing, Stroke, Tick, tick_at
from trimtab.report.plain import plain
from trimtab.report.roles import series_role

MAX_MARKED_POINTS = 40
"""Maximum number of points of a series whose points are marked with dots."""
MIN_LABEL_DISTANCE = 0.075
"""Minimum distance of two labels below a wide chart, as a fraction of its width; narrow charts show half of them."""
NO_VALUE = "no value"


def line_axes(chart: LineChart) -> tuple[Axis, Axis] | None:
    """Returns the x and y axes of a chart; None if none of its points can be drawn.

    Example:
        >>> line_axes(LineChart("a", "A", "x", "y", (Series("s", ((1, None),)),))) is None
        True
    """
    across, up = Axis(1, 2, chart.log_x), Axis(1, 2, chart.log_y)
    points = [(x, y) for series in chart.series for x, y in series.points if across.draws(x)]
    if not any(up.draws(y) for _, y in points):
        return None
    # Points without a value count: a length that ran out of memory must be visible on the x axis.
    x = axis_of((x for x, _ in points), log=chart.log_x, unit=unit_of(chart.x_label), room=False)
    return x, axis_of((y for _, y in points), log=chart.log_y, unit=unit_of(chart.y_label))


def x_values(chart: LineChart, x: Axis) -> list[float]:
    """Returns candidates for x ticks: the points' x values on a logarithmic axis, round values on a linear axis."""
    if not x.log:
        return x.ticks(8)
    found = {value for series in chart.series for value, _ in series.points if x.draws(value)}
    return [value for value in sorted(found) if -0.001 <= x.share(value) <= 1.001]


def draw_lines(chart: LineChart) -> Drawing | None:
    """Draws a line chart; returns None if none of its points can be drawn.

    Example:
        >>> chart = LineChart("a", "A", "x", "ms", (Series("s", ((0, 0.0), (1, 2.0))),))
        >>> draw_lines(chart).strokes[0].path
        'M0,1000L2000,38'
    """
    axes = line_axes(chart)
    if axes is None:
        return None
    x, y = axes
    series = [(plain(line.name, keep_newlines=False), drawn_points(line, x, y)) for line in chart.series]
    strokes = [_stroke(name, points, i, x, y) for i, (name, points) in enumerate(series)]
    ends = {max((at for at, value in points if math.isfinite(value)), default=None) for _, points in series}
    if len(ends) > 1:  # last values at different x cannot be compared
        strokes = [dataclasses.replace(stroke, last="") for stroke in strokes]
    places = {round(x.share(value), 6): value for _, points in series for value, _ in points}
    figure = {
        "x": [0, 1],
        "y": [0, 1],
        "titles": [_named(chart.x_label, places[share]) for share in sorted(places)],
        "lines": [
            {
                "name": name,
                "role": series_role(i),
                "x": [round(x.share(value), 6) for value, _ in points],
                "y": [round(y.share(value), 5) if math.isfinite(value) else None for _, value in points],
                "text": [format_value(value, y.unit) for _, value in points],
            }
            for i, (name, points) in enumerate(series)
        ],
    }
    listed = "; ".join(
        f"{stroke.name}, last {stroke.last}" if stroke.last else stroke.name for stroke in strokes
    )
    label = f"{chart.title}, {chart.y_label} over {chart.x_label}: {listed}"
    return Drawing(
        chart.id,
        chart.title,
        True,
        strokes,
        spread_ticks([(format_number(value), x.share(value)) for value in x_values(chart, x)]),
        [tick_at(y.tick_label(v), 1 - y.share(v), HEIGHT) for v in y.ticks(6)],
        label,
        figure,
        chart.x_label,
        chart.y_label,
    )


def _named(label: str, value: float) -> str:
    """Formats an x value: "context length 1,024 tokens"."""
    return plain(
        f"{quantity_of(label)} {format_value(value, unit_of(label) if ', ' in label else '')}".strip()
    )


def drawn_points(series: Series, x: Axis, y: Axis) -> list[Point]:
    """Returns the points in ascending x, thinned if there are many; y values that cannot be drawn become NaN."""
    points = [
        (at, value if value is not None and y.draws(value) else math.nan)
        for at, value in series.points
        if x.draws(at)
    ]
    return thin_points(sorted(points, key=lambda point: point[0]))


def _stroke(name: str, points: Sequence[Point], index: int, x: Axis, y: Axis) -> Stroke:
    path: list[str] = []
    dots: list[str] = []
    finite = [math.isfinite(value) for _, value in points]
    last = NO_VALUE
    for i, (at, value) in enumerate(points):
        if not finite[i]:
            continue
        place = f"{round(WIDTH * x.share(at))},{round(HEIGHT * (1 - y.share(value)))}"
        begins, ends = i == 0 or not finite[i - 1], i + 1 == len(points) or not finite[i + 1]
        path.append(f"{'M' if begins else 'L'}{place}")
        if len(points) <= MAX_MARKED_POINTS or (begins and ends):  # a point between two gaps has no line
            dots.append(f"M{place}h0")
        last = format_value(value, y.unit)
    return Stroke(name, series_role(index), "".join(path), "".join(dots), last)


def spread_ticks(labels: Sequence[tuple[str, float]]) -> list[Tick]:
    """Selects ticks from (label, relative position) so that labels do not overlap; narrow screens show fewer.

    Example:
        >>> [(t.label, t.wide) for t in spread_ticks([("1", 0.0), ("2", 0.1), ("4", 0.2), ("8", 1.0)])]
        [('1', False), ('2', True), ('4', False), ('8', False)]
    """
    longest = max((len(label) for label, _ in labels), default=1)
    shares = [share for _, share in labels]
    apart = max(MIN_LABEL_DISTANCE, 0.011 * longest)
    kept = spread(shares, shares, apart)
    narrow = spread(kept, kept, 2.3 * apart)
    found = []
    for label, share in labels:
        if share in kept:
            tick = tick_at(label, share, WIDTH)
            found.append(Tick(tick.label, tick.percent, tick.place, tick.anchor, share not in narrow))
    return found


def bin_shares(edges: Sequence[float]) -> list[float]:
    """Returns relative positions of bin edges: to scale, or equally spaced if bin widths differ more than tenfold.

    Example:
        >>> bin_shares([0, 1, 2]), bin_shares([0, 1, 100, 10000])
        ([0.0, 0.5, 1.0], [0.0, 0.3333333333333333, 0.6666666666666666, 1.0])
    """
    widths = [high - low for low, high in itertools.pairwise(edges)]
    if min(widths) <= 0 or not math.isfinite(sum(widths)) or max(widths) > 10 * min(widths):
        return [i / len(widths) for i in range(len(edges))]
    axis = Axis(edges[0], edges[-1])
    return [axis.share(edge) for edge in edges]


def draw_histogram(chart: Histogram) -> Drawing | None:
    """Draws a histogram; returns None without bins or without counts."""
    if len(chart.edges) < 2 or not any(any(counts) for _, counts in chart.counts):
        return None
    shares = bin_shares(chart.edges)
    y = Axis(0, 1.04 * max(max(counts, default=0) for _, counts in chart.counts))
    unit = unit_of(chart.x_label)
    strokes, lines = [], []
    for i, (name, counts) in enumerate(chart.counts):
        edge = [f"M0,{HEIGHT}"]
        for low, high, count in zip(shares, shares[1:], counts, strict=False):
            top = round(HEIGHT * (1 - y.share(count)))
            edge.append(f"H{round(WIDTH * low)}V{top}H{round(WIDTH * high)}")
        path = "".join([*edge, f"V{HEIGHT}"])
        shown = plain(name, keep_newlines=False)
        strokes.append(Stroke(shown, series_role(i), path, "", f"{sum(counts):,}", f"{path}Z"))
        lines.append(
            {
                "name": shown,
                "role": series_role(i),
                "x": [round((low + high) / 2, 6) for low, high in itertools.pairwise(shares)],
                "y": [round(y.share(count), 5) for count in counts],
                "text": [f"{count:,}" for count in counts],
            }
        )
    titles = [
        plain(f"{format_value(low, unit)} to {format_value(high, unit)}")
        for low, high in zip(chart.edges, chart.edges[1:], strict=False)
    ]
    listed = "; ".join(f"{stroke.name}, {stroke.last} values" for stroke in strokes)
    return Drawing(
        chart.id,
        chart.title,
        True,
        strokes,
        _edge_ticks(chart.edges, shares),
        [tick_at(format_number(v), 1 - y.share(v), HEIGHT) for v in y.ticks(5) if v == round(v)],
        f"{chart.title}, values by {chart.x_label}: {listed}",
        {"x": [0, 1], "y": [0, 1], "titles": titles, "lines": lines},
        chart.x_label,
        "values per bin",
    )


def _edge_ticks(edges: Sequence[float], shares: Sequence[float]) -> list[Tick]:
    """Returns ticks at round values if the bins are drawn to scale, otherwise at bin edges."""
    axis = axis_of(edges, room=False)
    true = all(
        math.isclose(share, axis.share(edge), abs_tol=1e-9) for edge, share in zip(edges, shares, strict=True)
    )
    if true:
        return spread_ticks([(format_number(v), axis.share(v)) for v in axis.ticks(8)])
    return spread_ticks(
        [(format_number(float(f"{e:.3g}")), share) for e, share in zip(edges, shares, strict=True)]
    )
