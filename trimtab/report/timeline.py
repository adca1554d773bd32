"""Draws the predicted memory of a training step as a stack, with its bands and phases."""

from __future__ import annotations

from typing import Any

from trimtab.facts.units import format_bytes
from trimtab.report.axes import BYTES
from trimtab.report.document import Band, StackChart, TimelinePhase
from trimtab.report.draw_stack import DrawnStack, draw_stack
from trimtab.report.roles import PARTS

SERIES = (
    ("weights", "weights", "weights"),
    ("optimizer", "optimizer states", "optimizer"),
    ("gradients", "gradients", "gradients"),
)
"""(key of a point, name, role) of the bands below the activations."""
PHASES = (("forward", "forward"), ("loss", "the loss"), ("backward", "backward"))
"""(label below the axis, prefix of its moments' titles) of each phase."""


def draw_timeline(points: list[dict[str, Any]], outside: int, available: int | None) -> DrawnStack | None:
    """Draws the stack of a step's moments; returns None if there are none.

    Args:
        points: results of `trimtab.plan.timeline.Point.to_dict`, one per moment.
        outside: device memory in bytes that is not tensors: CUDA context, libraries.
        available: memory in bytes that the run may use.
    """
    if not points:
        return None
    chart = StackChart(
        "timeline",
        "Memory over one step",
        "",
        BYTES,
        tuple(range(len(points))),
        len(points),
        tuple(_bands(points, outside)),
        tuple(_phases(points)),
        tuple(str(point["moment"]) for point in points),
        available,
        limit_label=f"{format_bytes(available)} available" if available is not None else "",
    )
    return draw_stack(chart)


def _bands(points: list[dict[str, Any]], outside: int) -> list[Band]:
    """Bands from bottom to top, without empty ones."""
    found = [Band("CUDA context and libraries", "outside", (outside,) * len(points))]
    found += [Band(name, role, tuple(int(point[key]) for point in points)) for key, name, role in SERIES]
    for part, role in PARTS.items():
        found.append(Band(part, role, tuple(max(int(point["parts"].get(part, 0)), 0) for point in points)))
    found.append(Band("optimizer update", "other", tuple(int(point["other"]) for point in points)))
    return [band for band in found if any(band.values)]


def _phases(points: list[dict[str, Any]]) -> list[TimelinePhase]:
    found = []
    for name, begins in PHASES:
        spans = [i for i, point in enumerate(points) if str(point["moment"]).startswith(begins)]
        if spans:
            found.append(TimelinePhase(name, spans[0], spans[-1] + 1))
    return found
