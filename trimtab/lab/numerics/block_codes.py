"""Codes of a few bits with a shared scale: a value is stored relative to the largest magnitude of its block. No torch.

The rules are those of `trimtab.kernels.nf4` and `trimtab.kernels.int8` (absmax) in exact arithmetic.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from trimtab.kernels.nf4 import spec as nf4

INT8_LARGEST = 127


@dataclass(frozen=True)
class BlockCode:
    """Levels between −1 and 1, which represent −absmax to absmax.

    Example:
        >>> code = CODES["nf4"]
        >>> place = code.nearest(Fraction(1, 2))
        >>> place, round(float(code.levels[place]), 4)
        (12, 0.4407)
    """

    name: str
    num_bits: int
    levels: tuple[Fraction, ...]
    """Ascending."""
    first_code: int
    """Code of the first level; the others are consecutive."""
    nearest: Callable[[Fraction], int]
    """Returns the index of the level to which a value between −1 and 1 is rounded."""

    def bits(self, place: int) -> str:
        """The stored bits of a level; two's complement for codes below zero."""
        return format((self.first_code + place) % 2**self.num_bits, f"0{self.num_bits}b")


def _nearest_nf4(relative: Fraction) -> int:
    """The number of thresholds below the value: ties are rounded down."""
    return bisect_left(nf4.THRESHOLDS, relative)


def _nearest_int8(relative: Fraction) -> int:
    """The nearest level; ties are rounded to the even code."""
    return round(relative * INT8_LARGEST) + INT8_LARGEST


CODES = {
    block_code.name: block_code
    for block_code in (
        BlockCode("nf4", 4, tuple(map(Fraction, nf4.TABLE)), 0, _nearest_nf4),
        BlockCode(
            "int8",
            8,
            tuple(Fraction(code, INT8_LARGEST) for code in range(-INT8_LARGEST, INT8_LARGEST + 1)),
            -INT8_LARGEST,
            _nearest_int8,
        ),
    )
}
"""Block codes by name. int8 is the symmetric (absmax) form, which does not use −128."""
