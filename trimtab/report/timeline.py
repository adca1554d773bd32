"""The memory of a training step as a stack: which bands a plan has, and how its moments are grouped into phases."""

from __future__ import annotations

from typing import Any

from trimtab.facts.units import format_bytes
from trimtab.report.axes import BYTES
from trimtab.report.document import Band, Phase, StackChart
from trimtab.report.draw_stack import DrawnStack, draw_stack
from trimtab.report.roles import PARTS

SERIES = (
    ("weights", "weights", "weights"),
    ("optimizer", "optimizer states", "optimizer"),
    ("gradients", "gradients", "gradients"),
)
"""(key of a point, name, role) of what stands below the activations."""
PHASES = (("forward", "forward"), ("loss", "the loss"), ("backward", "backward"))
"""What stands below the axis, and how the moments that it spans begin."""


def draw_timeline(points: list[dict[str, Any]], outside: int, available: int | None) -> DrawnStack | None:
    """The stack of a step's moments; None where there are none.

    Args:
        points: what `trimtab.plan.timeline.Point.to_dict` says of each moment.
        outside: bytes of the process besides its tensors: CUDA context, libraries.
        available: bytes that the run may take.
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
    """From the bottom of the stack to its top; empty ones left out."""
    found = [Band("CUDA context and libraries", "outside", (outside,) * len(points))]
    found += [Band(name, role, tuple(int(point[key]) for point in points)) for key, name, role in SERIES]
    for part, role in PARTS.items():
        found.append(Band(part, role, tuple(max(int(point["parts"].get(part, 0)), 0) for point in points)))
    found.append(Band("optimizer update", "other", tuple(int(point["other"]) for point in points)))
    return [band for band in found if any(band.values)]


def _phases(points: list[dict[str, Any]]) -> list[Phase]:
    found = []
    for name, begins in PHASES:
        spans = [i for i, point in enumerate(points) if str(point["moment"]).startswith(begins)]
        if spans:
            found.append(Phase(name, spans[0], spans[-1] + 1))
    return found
