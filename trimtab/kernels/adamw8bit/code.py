"""The 8-bit quantization map of the moments: fourth powers, rounded stochastically.

    first moment    m  = s₁ · sign(k) (|k| / p₁)⁴          k = code − 127 in −127 … 127,    p₁ = 127 − 1/64
    second moment   √v = s₂ · ((k + 16) / p₂)⁴             k = code in 0 … 255,             p₂ = 271 − 1/64

s is the largest magnitude of the block; it is scaled to slightly below the top level, so that rounding never exceeds
it. Neighbouring entries differ by 3 % (m) and 1.5 % (√v) at the block's maximum, and by only twice as much at a tenth
of it. √v has no zero: its smallest entry is 1.2e-5 of the block's maximum, so that the denominator is not zero unless
the first moment is. README.md explains the choice of this map and why rounding to nearest fails, and derives the
threshold in `encode`.
"""

# N elements in any shape

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from trimtab.kernels.adamw8bit.spec import FIRST_LEVEL, GRID, TOP1, TOP2, peak


class QuantizationMap(Protocol):
    """A quantization map: 256 entries for the values of a block, scaled so that the largest is `peak`."""

    @property
    def zero(self) -> int:
        """The code nearest to 0."""

    @property
    def peak(self) -> float:
        """The value that a block's largest magnitude is scaled to."""

    def decode(self, codes_N: torch.Tensor) -> torch.Tensor:
        """uint8 codes → fp32, same shape."""

    def encode(self, value_N: torch.Tensor, fraction_N: torch.Tensor) -> torch.Tensor:
        """fp32 of magnitude up to `peak` → codes as integers in fp32; `fraction_N` in (0, 1) decides the rounding."""


@dataclass(frozen=True)
class QuarticCode:
    """Entries (2 · level)⁴ for levels first … top, signed or unsigned.

    Twice the level, so that the threshold between two levels has integer coefficients.

    Example:
        >>> code = QuarticCode(signed=True, first=0, top=127)
        >>> code.decode(torch.tensor([0, 126, 127, 129], dtype=torch.uint8)).tolist()
        [-4162314240.0, -16.0, 0.0, 256.0]
        >>> code.encode(torch.tensor([-16.0, 0.0, 256.0]), torch.full((3,), 0.5)).tolist()
        [126.0, 127.0, 129.0]
    """

    signed: bool
    first: int
    top: int

    @property
    def zero(self) -> int:
        """The code of 0, or of the smallest entry."""
        return self.top if self.signed else 0

    @property
    def peak(self) -> float:
        """(2 · (top − 1/64))⁴"""
        return peak(self.top)

    def decode(self, codes_N: torch.Tensor) -> torch.Tensor:
        """uint8 → fp32, at most (2 · top)⁴."""
        twice_N = codes_N.float().add_(-self.top if self.signed else self.first).mul_(2)
        square_N = twice_N * twice_N.abs()
        return square_N.abs().mul_(square_N)

    def encode(self, value_N: torch.Tensor, fraction_N: torch.Tensor) -> torch.Tensor:
        """fp32 → integers in fp32, unbiased: E[decode(encode(x))] = x.

        The result is the level L below x, plus one if x is at least L⁴ + fraction · ((L + 1)⁴ − L⁴), everything times
        16: with j = 2L + 1 and T = j² + 1 that threshold is T · (T + 4 + (8 · fraction − 4) · j) − 4. Rounding x's
        fourth root instead would be simpler, but biased by the curvature at every step.
        """
        size_N = value_N.abs() if self.signed else value_N.clamp_min((2.0 * self.first) ** 4)
        # rounds the root to a multiple of 1/128 (values that close to a level may count as the level), then clears
        # its low bits to truncate it to an even number
        odd_N = size_N.sqrt().sqrt_().add_(GRID)
        odd_N.view(torch.int32).bitwise_and_(-256)
        odd_N.sub_(GRID - 1)
        t_N = odd_N.square().add_(1)
        threshold_N = fraction_N.mul(8).sub_(4).mul_(odd_N).add_(4).add_(t_N).mul_(t_N)
        above_N = size_N.sub_(threshold_N) if self.signed else size_N - threshold_N
        if self.signed:
            above_N.add_(4)  # for the other entries 4 is at most 4e-6: omitted
        level_N = odd_N.sub_(1).mul_(0.5).add_(above_N >= 0)
        return level_N.copysign_(value_N).add_(self.top) if self.signed else level_N.sub_(self.first)


@dataclass(frozen=True)
class StateFormat:
    """The quantization maps of both moments; benchmarks also use others."""

    first: QuantizationMap
    second: QuantizationMap
    root: bool
    """Whether √v is stored instead of v."""


DEFAULT_FORMAT = StateFormat(
    first=QuarticCode(signed=True, first=0, top=TOP1),
    second=QuarticCode(signed=False, first=FIRST_LEVEL, top=TOP2),
    root=True,
)
