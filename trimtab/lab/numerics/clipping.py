"""Clipping error against rounding error: a smaller range has finer steps and clips the largest values."""

# R rows, C columns

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

STEPS = 41
"""Number of thresholds in a sweep."""
LARGEST_CODES = {8: 127, 4: 7}
"""Largest code by bits; symmetric, so that the lowest code is unused."""


@dataclass(frozen=True)
class ClippingPoint:
    """Errors at one threshold: larger values are clipped, others rounded to multiples of threshold / largest code."""

    threshold: float
    clipping: float
    """Root of the mean square error of clipped values, averaged over all values."""
    rounding: float
    """Root of the mean square error of rounded values, averaged over all values."""

    @property
    def total(self) -> float:
        """Root mean square error."""
        return math.hypot(self.clipping, self.rounding)


@dataclass(frozen=True)
class ClippingSweep:
    """Errors with one scale for the tensor, at thresholds from half a root mean square up to the full range."""

    bits: int
    points: tuple[ClippingPoint, ...]

    @property
    def best(self) -> ClippingPoint:
        """The point with the smallest error."""
        return min(self.points, key=lambda point: point.total)

    @property
    def whole(self) -> ClippingPoint:
        """The point without clipping."""
        return self.points[-1]


def round_uniformly(x: torch.Tensor, threshold: float, largest: int) -> torch.Tensor:
    """Clips to ±threshold and rounds to 2 · largest + 1 equally spaced values.

    Example:
        >>> round_uniformly(torch.tensor([0.1, 0.5, 3.0]), threshold=1.0, largest=2)
        tensor([0.0000, 0.5000, 1.0000])
    """
    scale = threshold / largest
    return (x / scale).round().clamp(-largest, largest) * scale


def sweep_clipping(x_RC: torch.Tensor, bits: int) -> ClippingSweep:
    """Clipping and rounding error with one scale for the tensor, at many thresholds.

    Example:
        >>> from trimtab.lab.numerics.samples import load_sample
        >>> sweep = sweep_clipping(load_sample("gauss").values_RC, bits=4)
        >>> sweep.best.threshold < sweep.whole.threshold, sweep.whole.clipping
        (True, 0.0)
    """
    x_RC = x_RC.double()
    largest = LARGEST_CODES[bits]
    absmax = float(x_RC.abs().max())
    start = min(float(x_RC.square().mean().sqrt()) / 2, absmax / 2)
    ratio = (absmax / start) ** (1 / (STEPS - 1))
    thresholds = [start * ratio**step for step in range(STEPS - 1)] + [absmax]
    points = []
    for threshold in thresholds:
        squares_RC = (round_uniformly(x_RC, threshold, largest) - x_RC).square()
        beyond_RC = x_RC.abs() > threshold
        clipped = float(torch.where(beyond_RC, squares_RC, 0.0).mean())
        rounded = float(torch.where(beyond_RC, 0.0, squares_RC).mean())
        points.append(ClippingPoint(threshold, math.sqrt(clipped), math.sqrt(rounded)))
    return ClippingSweep(bits, tuple(points))
