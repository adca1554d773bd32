"""The accuracy criterion for implementations; the tests and the benchmark of every operation use it.

The truth is computed in fp64. An implementation may be no further from the truth than the reference run in the same
dtype, plus a small tolerance relative to the truth's magnitude:

    rms(x − truth)     ≤  rms(reference − truth)          + tolerance · rms(truth)
    max|x − truth|     ≤  2 · max|reference − truth|      + tolerance · max|truth|

The first criterion catches errors in all elements (a factor of 1.01 fails in every dtype), the second errors in few
elements (a row, a tile's edge); its factor of two allows for noise in the largest of many rounding errors. Both apply
to the output and to the gradient of every input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

TOLERANCE: dict[str, float] = {"fp64": 1e-12, "fp32": 4e-6, "fp16": 1e-3, "bf16": 4e-3}
"""Tolerance by dtype, relative to the truth: a few ulp of a sum, an order of magnitude below the 1 % that must fail."""


@dataclass(frozen=True)
class AccuracyCheck:
    """Both errors and their limits; `bool(check)` is true if both errors are within their limits."""

    name: str
    rms_error: float
    rms_allowed: float
    max_error: float
    max_allowed: float

    def __bool__(self) -> bool:
        # Written so that a NaN error fails: every comparison with NaN is false.
        return self.rms_error <= self.rms_allowed and self.max_error <= self.max_allowed


def check_accuracy(
    name: str,
    got: torch.Tensor,
    *,
    truth: torch.Tensor,
    reference: torch.Tensor,
    tolerance: float,
    floor: float = 0.0,
    peak_floor: float | None = None,
) -> AccuracyCheck:
    """Compares a result with the fp64 truth; allows the error of the reference in the same dtype plus a tolerance.

    Args:
        name: Name of the compared tensor, for messages.
        got, reference: Any shape, the dtype under test.
        truth: The same shape in fp64.
        tolerance: Relative to the truth's magnitude; `TOLERANCE[dtype]` unless the operation's spec sets another.
        floor: Lower bound on the truth's rms, for results that cancel to zero (the gradient
            of a query that attends to a single key is zero, its rounding errors are not).
        peak_floor: Lower bound on the truth's largest magnitude; `floor` if not given.

    Example:
        >>> import torch
        >>> x = torch.ones(4, dtype=torch.float64)
        >>> bool(check_accuracy("x", x.float(), truth=x, reference=x.float(), tolerance=4e-6))
        True
        >>> bool(check_accuracy("x", x.float() * 1.01, truth=x, reference=x.float(), tolerance=4e-6))
        False
    """
    assert got.shape == truth.shape == reference.shape, f"{name}: {got.shape}, truth {truth.shape}"
    if truth.numel() == 0:
        return AccuracyCheck(name, 0.0, 0.0, 0.0, 0.0)
    truth = truth.double()
    error, own = got.double() - truth, reference.double() - truth

    def rms(x: torch.Tensor) -> float:
        return float(x.square().mean().sqrt())

    def peak(x: torch.Tensor) -> float:
        return float(x.abs().max())

    return AccuracyCheck(
        name=name,
        rms_error=rms(error),
        rms_allowed=rms(own) + tolerance * max(rms(truth), floor),
        max_error=peak(error),
        max_allowed=2 * peak(own) + tolerance * max(peak(truth), floor if peak_floor is None else peak_floor),
    )
