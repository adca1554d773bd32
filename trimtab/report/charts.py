"""Charts of a run as plain data: their lines and points. `drawing` turns them into SVG."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from trimtab.report.plain import plain
from trimtab.report.rundata import RunData

MAX_POINTS = 800
"""Maximum points per curve; longer curves are reduced to the minimum and maximum of each interval."""
MIN_SMOOTHED_STEPS = 30
"""Number of steps from which a smoothed training loss is drawn over the loss of each step."""
NUM_EVAL_COLOURS = 3
"""Number of colours for evaluation sets; further sets reuse them."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """A named curve; `role` selects its colour, `markers` adds dots. Non-finite values are gaps."""

    name: str
    role: str
    points: list[Point]
    markers: bool = False


@dataclass(frozen=True)
class Chart:
    """Lines over steps; a `large` chart has full width, a legend and an axis that may start above zero."""

    id: str
    title: str
    lines: list[Line]
    large: bool = False


def charts(data: RunData) -> list[Chart]:
    """Returns the charts for which the run has data: one large chart of losses, then small charts."""
    found = []
    lines = _losses(data)
    if lines:
        found.append(Chart("loss", "Loss, nats per token", lines, large=True))
    train = data.of("train")
    small = (
        ("lr", "Learning rate", "lr"),
        ("norm", "Gradient norm", "grad_norm"),
        ("rate", "Tokens per second", "tokens_per_second"),
    )
    if len(train) > 1:
        for name, title, key in small:
            found.append(Chart(name, title, [_line(train, key, title, "single")]))
    if len({r["step"] for r in data.of("answers")}) > 1:
        shares = [
            {"step": r["step"], "share": 100 * r["exact"] / max(1, r["total"])} for r in data.of("answers")
        ]
        line = _line(shares, "share", "exact answers", "single", markers=True)
        found.append(Chart("answers", "Exact answers, percent", [line]))
    return found


def _losses(data: RunData) -> list[Line]:
    """Lines of the training loss, per step and smoothed, and of each held-out set."""
    lines = []
    train = data.of("train")
    if len(train) >= MIN_SMOOTHED_STEPS:
        smooth = _smoothed([r["loss"] for r in train])
        rows = [{"step": r["step"], "loss": v} for r, v in zip(train, smooth, strict=True)]
        lines.append(_line(train, "loss", "training, each step", "faint"))
        lines.append(_line(rows, "loss", "training, smoothed", "train"))
    elif train:
        lines.append(_line(train, "loss", "training", "train", markers=len(train) == 1))
    for i, name in enumerate(data.eval_names()):
        rows = [r for r in data.of("eval") if r["name"] == name]
        lines.append(_line(rows, "loss", f"held-out: {name}", f"eval{i % NUM_EVAL_COLOURS}", markers=True))
    return lines


def _smoothed(values: list[float]) -> list[float]:
    """Centered moving average over a twentieth of the run, truncated at both ends; ignores non-finite values.

    Example:
        >>> _smoothed([3.0, 1.0, 2.0, 9.0])
        [2.0, 2.0, 4.0, 5.5]
    """
    half = max(1, len(values) // 40)
    sums, counts = [0.0], [0]
    for value in values:
        finite = math.isfinite(value)
        sums.append(sums[-1] + (value if finite else 0.0))
        counts.append(counts[-1] + finite)
    found = []
    for i in range(len(values)):
        low, high = max(0, i - half), min(len(values), i + half + 1)
        number = counts[high] - counts[low]
        found.append((sums[high] - sums[low]) / number if number else math.nan)
    return found


def _line(rows: list[dict[str, Any]], key: str, name: str, role: str, *, markers: bool = False) -> Line:
    points = thin_points([(r["step"], r[key]) for r in rows])
    return Line(plain(name, keep_newlines=False), role, points, markers)


def thin_points(points: list[Point]) -> list[Point]:
    """Reduces the points to about MAX_POINTS and keeps every spike."""
    if len(points) <= MAX_POINTS:
        return points
    stretch = -(-2 * len(points) // MAX_POINTS)
    kept = []
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        # A non-finite value counts as the maximum, so that gaps are preserved.
        by_value = sorted(part, key=lambda p: p[1] if math.isfinite(p[1]) else math.inf)
        last = part[-1:] if start + stretch >= len(points) else []  # the legend shows the last value
        kept += sorted({by_value[0], by_value[-1], *last}, key=lambda p: p[0])
    return kept
