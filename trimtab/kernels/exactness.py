"""The accuracy criterion for implementations; the tests and the benchmark of every operation use it.

The truth is computed in fp64. An implementation may be no further from the truth than the reference run in the same
dtype, plus a small share of the truth's magnitude:

    rms(x − truth)     ≤  rms(reference − truth)          + share · rms(truth)
    max|x − truth|     ≤  2 · max|reference − truth|      + share · max|truth|

The first criterion catches errors in all elements (a factor of 1.01 fails in every dtype), the second errors in few
elements (a row, a tile's edge); its factor of two allows for noise in the largest of many rounding errors. Both apply
to the output and to the gradient of every input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SHARE: dict[str, float] = {"fp64": 1e-12, "fp32": 4e-6, "fp16": 1e-3, "bf16": 4e-3}
"""Tolerance by dtype, relative to the truth: a few ulp of a sum, an order of magnitude below the 1 % that must fail."""


@dataclass(frozen=True)
class Verdict:
    """Both errors and their limits; `bool(verdict)` is true if both errors are within their limits."""

    name: str
    rms_error: float
    rms_allowed: float
    max_error: float
    max_allowed: float

    def __bool__(self) -> bool:
        # Written so that a NaN error fails: every comparison with NaN is false.
        return self.rms_error <= self.rms_allowed and self.max_error <= self.max_allowed


def judge(
    name: str,
    got: torch.Tensor,
    *,
    truth: torch.Tensor,
    reference: torch.Tensor,
    share: float,
    floor: float = 0.0,
    peak_floor: float | None = None,
) -> Verdict:
    """Compares a result with the fp64 truth; allows the error of the reference in the same dtype plus a share.

    Args:
        name: Name of the compared tensor, for messages.
        got, reference: Any shape, the dtype under test.
        truth: The same shape in fp64.
        share: Tolerance relative to the truth's magnitude; `SHARE[dtype]` unless the operation's spec sets another.
        floor: Lower bound on the truth's rms, for results that cancel to zero (the gradient
            of a query that attends to a single key is zero, its rounding errors are not).
        peak_floor: Lower bound on the truth's largest magnitude; `floor` if not given.

    Example:
        >>> import torch
        >>> x = torch.ones(4, dtype=torch.float64)
        >>> bool(judge("x", x.float(), truth=x, reference=x.float(), share=4e-6))
        True
        >>> bool(judge("x", x.float() * 1.01, truth=x, reference=x.float(), share=4e-6))
        False
    """
    assert got.shape == truth.shape == reference.shape, f"{name}: {got.shape}, truth {truth.shape}"
    if truth.numel() == 0:
        return Verdict(name, 0.0, 0.0, 0.0, 0.0)
    truth = truth.double()
    error, own = got.double() - truth, reference.double() - truth

    def rms(x: torch.Tensor) -> float:
        return float(x.square().mean().sqrt())

    def peak(x: torch.Tensor) -> float:
        return float(x.abs().max())

    return Verdict(
        name=name,
        rms_error=rms(error),
        rms_allowed=rms(own) + share * max(rms(truth), floor),
        max_error=peak(error),
        max_allowed=2 * peak(own) + share * max(peak(truth), floor if peak_floor is None else peak_floor),
    )
