"""A run's curves as plotly figures, in plain data; the page gives them its colours."""

from __future__ import annotations

import html
import math
from dataclasses import dataclass
from typing import Any

from trimtab.report.plain import plain
from trimtab.report.rundata import RunData

MOST_POINTS = 2000
"""Points of a curve in the page; of longer ones the least and the greatest of each stretch are kept."""
SMOOTH_FROM = 30
"""Steps from which on a smoothed training loss is drawn over the single steps."""


@dataclass(frozen=True)
class Chart:
    """A figure and where it goes: `large` ones have a row of their own."""

    id: str
    title: str
    figure: dict[str, Any]
    large: bool = False


def charts(data: RunData) -> list[Chart]:
    """What the run has data for: losses in one large chart, then small ones of how it ran."""
    found = []
    lines = _losses(data)
    if lines:
        found.append(Chart("loss", "Loss, in nats a token", _figure(lines, large=True), large=True))
    train = data.of("train")
    small = (
        ("lr", "Learning rate", "lr"),
        ("norm", "Gradient norm", "grad_norm"),
        ("rate", "Tokens a second", "tokens_per_second"),
    )
    if len(train) > 1:
        for name, title, key in small:
            line = {**_line(train, key, title), "role": "small"}
            found.append(Chart(name, title, _figure([line])))
    if len({r["step"] for r in data.of("answers")}) > 1:
        shares = [
            {"step": r["step"], "share": 100 * r["exact"] / max(1, r["total"])} for r in data.of("answers")
        ]
        line = {**_line(shares, "share", "exact answers", markers=True), "role": "small"}
        found.append(Chart("answers", "Exact answers, per cent", _figure([line])))
    return found


def _losses(data: RunData) -> list[dict[str, Any]]:
    """Training loss, smoothed over the single steps, and each held-out set; `role` picks the colour."""
    lines = []
    train = data.of("train")
    if len(train) >= SMOOTH_FROM:
        smooth = _smoothed([r["loss"] for r in train])
        rows = [{"step": r["step"], "loss": v} for r, v in zip(train, smooth, strict=True)]
        lines.append({**_line(train, "loss", "training, each step"), "role": "faint"})
        lines.append({**_line(rows, "loss", "training, smoothed"), "role": "train"})
    elif train:
        lines.append({**_line(train, "loss", "training", markers=len(train) == 1), "role": "train"})
    for i, name in enumerate(data.eval_names()):
        rows = [r for r in data.of("eval") if r["name"] == name]
        lines.append({**_line(rows, "loss", f"held-out: {name}", markers=True), "role": f"eval{i % 3}"})
    return lines


def _smoothed(values: list[float]) -> list[float]:
    """Mean over a twentieth of the run around each step, which does not lag behind; passes over what is not finite.

    Example:
        >>> _smoothed([3.0, 1.0, 2.0, 9.0])
        [3.0, 2.0, 4.0, 9.0]
    """
    half = max(1, len(values) // 40)
    sums, counts = [0.0], [0]
    for value in values:
        finite = math.isfinite(value)
        sums.append(sums[-1] + (value if finite else 0.0))
        counts.append(counts[-1] + finite)
    found = []
    for i in range(len(values)):
        reach = min(half, i, len(values) - 1 - i)
        low, high = i - reach, i + reach + 1
        number = counts[high] - counts[low]
        found.append((sums[high] - sums[low]) / number if number else math.nan)
    return found


def _line(rows: list[dict[str, Any]], key: str, name: str, *, markers: bool = False) -> dict[str, Any]:
    points = _thinned([(r["step"], r[key]) for r in rows])
    return {
        "type": "scatter",
        "mode": "lines+markers" if markers else "lines",
        # Plotly reads a few HTML tags in names, so what looks like one is made plain text.
        "name": html.escape(plain(name, keep_newlines=False)),
        "x": [x for x, _ in points],
        # A chart leaves a gap where a number is not finite.
        "y": [y if math.isfinite(y) else None for _, y in points],
        "hovertemplate": "%{y:.4~g}",
    }


def _thinned(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most about MOST_POINTS, with every spike still there."""
    if len(points) <= MOST_POINTS:
        return points
    stretch = -(-2 * len(points) // MOST_POINTS)
    kept = []
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        # Not finite counts as greatest, so that a gap stays a gap.
        by_value = sorted(part, key=lambda p: p[1] if math.isfinite(p[1]) else math.inf)
        kept += sorted({by_value[0], by_value[-1]}, key=lambda p: p[0])
    return kept


def _figure(lines: list[dict[str, Any]], *, large: bool = False) -> dict[str, Any]:
    axis = {"zeroline": False, "automargin": True}
    steps: dict[str, Any] = {**axis, "tickformat": "d", "nticks": 10 if large else 4}
    if max((x for line in lines for x in line["x"]), default=0) < steps["nticks"]:
        steps["dtick"] = 1  # ticks between whole steps would show the same number twice
    values: dict[str, Any] = {**axis, "nticks": 8 if large else 4}
    if large:
        steps["title"] = {"text": "step"}
    else:
        values["rangemode"] = "tozero"
    layout = {
        "xaxis": steps,
        "yaxis": values,
        "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
        "height": 360 if large else 160,
        "hovermode": "x unified" if large else "closest",
        "showlegend": large,
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
    }
    return {"data": lines, "layout": layout}
