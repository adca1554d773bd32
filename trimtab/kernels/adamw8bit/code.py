"""The code of the moments: fourth powers, rounded stochastically.

    first moment    m  = s₁ · sign(k) (|k| / 127)⁴          k = code − 127 in −127 … 127
    second moment   √v = s₂ · ((k + 16) / 271)⁴             k = code in 0 … 255

s is the largest magnitude of the block. Neighbouring entries differ by 3 % (m) and 1.5 % (√v) at the block's
largest value and by only twice as much at a tenth of it. √v has no zero: its smallest entry is 1.2e-5 of the
block's largest, so a denominator never vanishes under a first moment that did not. Why this code, and why
rounding to nearest fails: README.md.
"""

# N elements in any shape

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


class Code(Protocol):
    """256 numbers that a block's values, divided by their largest magnitude, are stored as."""

    @property
    def zero(self) -> int:
        """The code nearest to 0."""

    def decode(self, codes_N: torch.Tensor) -> torch.Tensor:
        """uint8 codes → fp32, same shape."""

    def encode(self, value_N: torch.Tensor, fraction_N: torch.Tensor) -> torch.Tensor:
        """fp32 in [−1, 1] → codes as whole numbers, same shape; `fraction_N` in (0, 1) decides."""


@dataclass(frozen=True)
class QuarticCode:
    """Entries (level / top)⁴ for levels first … top, with a sign of their own or none.

    Example:
        >>> code = QuarticCode(signed=True, first=0, top=127)
        >>> code.encode(torch.tensor([-1.0, 0.0, 1.0]), torch.full((3,), 0.5)).tolist()
        [0.0, 127.0, 254.0]
        >>> code.decode(torch.tensor([0, 127, 254], dtype=torch.uint8)).tolist()
        [-1.0, 0.0, 1.0]
    """

    signed: bool
    first: int
    top: int

    @property
    def zero(self) -> int:
        """The code of 0, or of the smallest entry."""
        return self.top if self.signed else 0

    def _entry(self, level_N: torch.Tensor) -> torch.Tensor:
        # a division, not a product with 1/top: the top level has to be exactly 1
        return level_N.div(self.top).square_().square_()

    def decode(self, codes_N: torch.Tensor) -> torch.Tensor:
        """uint8 → fp32 in [−1, 1]."""
        if not self.signed:
            return self._entry(codes_N.float().add_(self.first))
        level_N = codes_N.float().sub_(self.top)
        return self._entry(level_N).copysign_(level_N)

    def encode(self, value_N: torch.Tensor, fraction_N: torch.Tensor) -> torch.Tensor:
        """fp32 in [−1, 1] → whole numbers in fp32, unbiased: E[decode(encode(x))] = x.

        The level below x, then one up with probability (x − below)/(above − below). Rounding x's fourth root
        instead would be simpler and biased by the curvature, step after step.
        """
        size_N = value_N.abs() if self.signed else value_N
        level_N = size_N.sqrt().sqrt_().mul_(self.top).floor_().clamp_(self.first, self.top - 1)
        below_N = self._entry(level_N)
        gap_N = self._entry(level_N + 1).sub_(below_N)
        level_N.add_((size_N - below_N).div_(gap_N).sub_(fraction_N).ceil_().clamp_(0, 1))
        return level_N.copysign_(value_N).add_(self.top) if self.signed else level_N.sub_(self.first)


@dataclass(frozen=True)
class Format:
    """How a pair of moments is stored; a study may try others."""

    first: Code
    second: Code
    root: bool
    """√v is stored instead of v"""


SHIPPED = Format(
    first=QuarticCode(signed=True, first=0, top=127),
    second=QuarticCode(signed=False, first=16, top=271),
    root=True,
)
