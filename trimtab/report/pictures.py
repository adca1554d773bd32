"""Writes the charts of a document as PNG or SVG files with matplotlib, if it is installed.

They are for places that cannot embed HTML: a README, a paper, report.md on a site. Colours are those of the HTML page.
"""

from __future__ import annotations

import importlib.util
import io
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trimtab.facts.files import write_atomic
from trimtab.report.axes import BYTES, Axis, format_number, spread
from trimtab.report.document import (
    BarChart,
    Chart,
    Code,
    Document,
    Histogram,
    LineChart,
    StackChart,
    Table,
    Text,
)
from trimtab.report.draw_bars import part_names, part_value, scale
from trimtab.report.draw_lines import MAX_MARKED_POINTS, bin_shares, drawn_points, line_axes, x_values
from trimtab.report.draw_stack import AXIS_HEADROOM, MAX_SHOWN_LIMIT, read_stack, thin_moments
from trimtab.report.plain import plain
from trimtab.report.roles import named_roles, series_role, tones

MISSING = "no PNG charts were written because matplotlib is not installed; pip install 'trimtab[lab]'"
FORMATS = ("png", "svg")
SIZE = (8.0, 4.4)
"""Inches."""
DPI = 120
DRAWN_MOMENTS = 4_000
DASHES = ("-", (0, (5, 2)), (0, (1, 2)))
MAX_NAME_CHARS = 46
MAX_BARS = 30
STYLE: dict[Any, Any] = {
    "text.parse_math": False,
    "font.size": 9.5,
    "axes.edgecolor": "#98a1b0",
    "axes.labelcolor": "#1c2230",
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlesize": 11,
    "grid.color": "#e3e6ec",
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "svg.hashsalt": "trimtab",
    "xtick.color": "#667085",
    "ytick.color": "#667085",
}
"""matplotlib settings; `text.parse_math` is off, so that a `$` in a name does not start a formula."""


def can_draw() -> bool:
    """Whether matplotlib is installed; it is not imported."""
    return importlib.util.find_spec("matplotlib") is not None


def write_pictures(document: Document, folder: Path, formats: Sequence[str] = ("png",)) -> list[Path]:
    """Writes `<id>.<format>` of each chart that has values; writes nothing if matplotlib is not installed.

    Args:
        document: the document with the charts.
        folder: the folder to write to, which is created if needed.
        formats: png and svg.

    Example:
        >>> write_pictures(document, Path("lab/step/pictures"))  # doctest: +SKIP
        [PosixPath('lab/step/pictures/times.png')]
    """
    if not can_draw():
        return []
    found = []
    for section in document.sections:
        for block in section.blocks:
            if isinstance(block, Text | Code | Table):
                continue
            for kind in formats:
                data = draw_picture(block, kind)
                if data is not None:
                    folder.mkdir(parents=True, exist_ok=True)
                    target = folder / f"{block.id}.{kind}"
                    write_atomic(target, data)
                    found.append(target)
    return found


def draw_picture(chart: Chart, kind: str = "png") -> bytes | None:
    """Returns the image of a chart as bytes; None if it has no values. Needs matplotlib.

    Example:
        >>> draw_picture(chart, "svg")[:5]  # doctest: +SKIP
        b'<?xml'
    """
    import matplotlib
    from matplotlib.figure import Figure

    assert kind in FORMATS, kind
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Glyph"
        )  # a character missing in the font is drawn as a box
        figure = Figure(figsize=_size(chart), layout="constrained")
        axes = figure.add_subplot()
        drawn = _draw(chart, axes)
        if not drawn:
            return None
        axes.set_title(_text(chart.title))
        file = io.BytesIO()
        # Without date and version, equal charts produce identical files.
        metadata = {"Software": None} if kind == "png" else {"Date": None, "Creator": None}
        figure.savefig(file, format=kind, dpi=DPI, metadata=metadata)
    return file.getvalue()


def _draw(chart: Chart, axes: Any) -> bool:
    if isinstance(chart, LineChart):
        return _lines(chart, axes)
    if isinstance(chart, BarChart):
        return _bars(chart, axes)
    if isinstance(chart, StackChart):
        return _stack(chart, axes)
    return _histogram(chart, axes)


def _size(chart: Chart) -> tuple[float, float]:
    """Returns the size in inches; the height of a bar chart depends on the number of bars."""
    if not isinstance(chart, BarChart):
        return SIZE
    return SIZE[0], max(1.8, 0.9 + 0.3 * min(len(chart.bars), MAX_BARS))


def _text(text: str, longest: int = 90) -> str:
    shown = plain(text, keep_newlines=False)
    return shown if len(shown) <= longest else f"{shown[: longest - 1]}…"


def _tone(role: str) -> dict[str, Any]:
    """Returns the colour and line style of a series."""
    tone, _, dash = role.partition(" dash")
    return {"color": tones()[tone], "linestyle": DASHES[int(dash or 0)]}


def _fill(role: str) -> dict[str, Any]:
    """Returns the fill of an area; a reused colour is paler."""
    tone, _, dash = role.partition(" dash")
    return {"color": _paler(tones()[tone], (1.0, 0.6, 0.32)[int(dash or 0)]), "linewidth": 0}


def _paler(color: str, share: float) -> str:
    parts = (int(color[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(255 - share * (255 - part)):02x}" for part in parts)


def _scale(axis: Axis, side: Any, limits: Any, ticks: Sequence[float], labels: Sequence[str]) -> None:
    """Sets ticks at relative positions of the axis, so that every value that the HTML page can show is supported."""
    side.set_ticks([axis.share(value) for value in ticks], [_text(label) for label in labels])
    side.set_minor_locator(_no_ticks())
    limits(0, 1)


def _no_ticks() -> Any:
    from matplotlib.ticker import NullLocator

    return NullLocator()


def _legend(axes: Any, names: Sequence[str], handles: Sequence[Any]) -> None:
    """Adds a legend below the chart with columns that fit the names; names may start with an underscore."""
    if not names:
        return
    longest = max(len(name) for name in names)
    columns = max(1, min(len(names), 100 // (longest + 7)))
    legend = axes.figure.legend(
        handles, [str(i) for i in range(len(names))], loc="outside lower left", ncols=columns
    )
    for entry, name in zip(legend.get_texts(), names, strict=True):
        entry.set_text(name)


def _lines(chart: LineChart, axes: Any) -> bool:
    found = line_axes(chart)
    if found is None:
        return False
    x, y = found
    handles = []
    for i, series in enumerate(chart.series):
        points = drawn_points(series, x, y)
        places = [x.share(at) for at, _ in points]
        heights = [y.share(value) if math.isfinite(value) else math.nan for _, value in points]
        marker = "o" if len(points) <= MAX_MARKED_POINTS else None
        handles += axes.plot(
            places, heights, marker=marker, markersize=3.5, linewidth=1.6, **_tone(series_role(i))
        )
    ticks = _apart(x, x_values(chart, x))
    _scale(x, axes.xaxis, axes.set_xlim, ticks, [format_number(value) for value in ticks])
    values = y.ticks(6)
    _scale(y, axes.yaxis, axes.set_ylim, values, [y.tick_label(value) for value in values])
    axes.set_xlim(-0.01, 1.01)
    axes.set_xlabel(_text(chart.x_label))
    axes.set_ylabel("" if y.unit == BYTES and chart.y_label == BYTES else _text(chart.y_label, 50))
    if len(chart.series) > 1:
        _legend(axes, [_text(series.name, MAX_NAME_CHARS) for series in chart.series], handles)
    return True


def _apart(axis: Axis, values: Sequence[float]) -> list[float]:
    return spread(values, [axis.share(value) for value in values], 0.08)


def _bars(chart: BarChart, axes: Any) -> bool:
    if not chart.bars:
        return False
    names = part_names(chart)
    roles = dict(zip(names, named_roles(names), strict=True))
    whole = scale(chart)
    handles: dict[str, Any] = {}
    shown = chart.bars[:MAX_BARS]
    for row, bar in enumerate(shown):
        start = 0.0
        for name, value in bar.parts:
            width = part_value(value) / whole
            handles[name] = axes.barh(row, width, left=start, height=0.66, **_fill(roles[name]))
            start += width
        axes.text(start + 0.01, row, _text(bar.label, 40), va="center", fontsize=8.5, color="#1c2230")
    axes.set_yticks(range(len(shown)), [_text(bar.name, MAX_NAME_CHARS) for bar in shown], color="#1c2230")
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.set_xlim(0, 1.25)
    axes.spines["bottom"].set_visible(False)
    axes.grid(False)
    if len(handles) > 1:
        _legend(axes, [_text(name, MAX_NAME_CHARS) for name in handles], list(handles.values()))
    return True


def _stack(chart: StackChart, axes: Any) -> bool:
    stack = read_stack(chart)
    if stack is None:
        return False
    limit = chart.limit if chart.limit and chart.limit <= MAX_SHOWN_LIMIT * max(stack.tops) else None
    x, y = (
        Axis(stack.x[0], stack.end),
        Axis(0, AXIS_HEADROOM * max(*stack.tops, limit or 0.0), unit=chart.unit),
    )
    kept = thin_moments(stack, DRAWN_MOMENTS, [phase.start for phase in chart.phases])
    places = [*(x.share(stack.x[i]) for i in kept), 1.0]
    handles = []
    below = [0.0] * (len(kept) + 1)
    for role, values in zip(named_roles([band.role for band in chart.bands]), stack.values, strict=True):
        kinds = [values[i] for i in kept]
        above = [low + y.share(value) for low, value in zip(below, [*kinds, kinds[-1]], strict=True)]
        handles.append(axes.fill_between(places, below, above, step="post", **_fill(role)))
        below = above
    if limit:
        axes.axhline(y.share(limit), color="#b3372a", linestyle=(0, (4, 3)), linewidth=1)
    ticks = y.ticks(6)
    _scale(y, axes.yaxis, axes.set_ylim, ticks, [y.tick_label(value) for value in ticks])
    ticks = x.ticks(8) if chart.x_label else []
    _scale(x, axes.xaxis, axes.set_xlim, ticks, [format_number(value) for value in ticks])
    axes.set_ylabel("" if chart.unit == BYTES else _text(chart.unit, 50))
    axes.set_xlabel(_text(chart.x_label))
    for phase in chart.phases:
        low, high = max(x.share(phase.start), 0.0), min(x.share(phase.end), 1.0)
        if low > 0:
            axes.axvline(low, color="#1c2230", alpha=0.3, linewidth=0.8)
        if 95 * (high - low) > len(phase.name):
            axes.text((low + high) / 2, 0.985, _text(phase.name, 30), ha="center", va="top", fontsize=8.5)
    names = [_text(band.name, MAX_NAME_CHARS) for band in chart.bands]
    _legend(axes, names[::-1], handles[::-1])
    return True


def _histogram(chart: Histogram, axes: Any) -> bool:
    if len(chart.edges) < 2 or not any(any(counts) for _, counts in chart.counts):
        return False
    shares = bin_shares(chart.edges)
    y = Axis(0, 1.04 * max(max(counts, default=0) for _, counts in chart.counts))
    handles = []
    for i, (_, counts) in enumerate(chart.counts):
        heights = [y.share(count) for count in counts]
        color = tones()[series_role(i).partition(" ")[0]]
        axes.stairs(heights, shares, fill=True, color=color, alpha=0.18)
        handles.append(axes.stairs(heights, shares, linewidth=1.5, **_tone(series_role(i))))
    values = [value for value in y.ticks(5) if value == round(value)]
    _scale(y, axes.yaxis, axes.set_ylim, values, [format_number(value) for value in values])
    apart = max(1, -(-len(chart.edges) // 9))
    axes.set_xticks(shares[::apart], [format_number(float(f"{edge:.3g}")) for edge in chart.edges[::apart]])
    axes.set_xlabel(_text(chart.x_label))
    axes.set_ylabel("values per bin")
    if len(chart.counts) > 1:
        _legend(axes, [_text(name, MAX_NAME_CHARS) for name, _ in chart.counts], handles)
    return True
