"""When is an implementation exact enough? One rule for the tests of every operation.

Truth is computed in fp64. An implementation may be no further from truth than the reference run in the same
dtype, plus a small stated share of truth's size:

    rms(x − truth)     ≤  rms(reference − truth)          + share · rms(truth)
    max|x − truth|     ≤  2 · max|reference − truth|      + share · max|truth|

The first line catches what is off everywhere (a factor of 1.01 fails in every dtype), the second what is off
in one place (a row, a tile's edge); its factor of two is there because the largest of many rounding errors is
itself noisy. The rule holds for the output and for the gradient of every input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

SHARE: dict[str, float] = {"fp64": 1e-12, "fp32": 4e-6, "fp16": 1e-3, "bf16": 4e-3}
"""The share by dtype: a few units in the last place of a sum, an order below the 1 % that must fail."""


@dataclass(frozen=True)
class Verdict:
    """Both errors beside what was allowed; `bool(verdict)` says whether they are within it."""

    name: str
    rms_error: float
    rms_allowed: float
    max_error: float
    max_allowed: float

    def __bool__(self) -> bool:
        # Written so that a NaN error, which compares false with everything, fails.
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
    """Compares a result with truth, allowing what the reference in the same dtype was off, and a share.

    Args:
        name: What is compared, for the message.
        got, reference: Any shape, the dtype under test.
        truth: The same shape in fp64.
        share: Of truth's size; `SHARE[dtype]` unless the operation's spec says otherwise.
        floor: The least size that truth is taken to have, for results that cancel to nothing (the gradient
            of a query that sees a single key is zero, its rounding errors are not).
        peak_floor: The same for its largest number; `floor`, if not given.

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
