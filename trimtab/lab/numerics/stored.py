"""A number stored in one format: bits, neighbours, error. Imports no torch."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from trimtab.lab.numerics.block_codes import BlockCode
from trimtab.lab.numerics.formats import FloatFormat, Kind, Number
from trimtab.lab.numerics.number_text import json_number, short_decimal


class StorageOutcome(enum.Enum):
    """The outcome of storing a number."""

    EXACT = "exact"
    ROUNDED = "rounded"
    TIE = "tie, rounded to even"
    TO_ZERO = "rounded to zero"
    TO_INFINITY = "overflow to infinity"
    SATURATED = "overflow, saturated"
    NOT_STORED = "cannot be stored"


@dataclass(frozen=True)
class Stored:
    """A number in one format."""

    exact: Number
    """The number before rounding."""
    stored: Number | None
    """None for infinity and NaN in a block code."""
    below: Number | None
    """The next number of the format below the stored one; None where there is none."""
    above: Number | None
    outcome: StorageOutcome
    bits: tuple[str, ...]
    """Sign, exponent and mantissa, or the code."""

    @property
    def error(self) -> Fraction | None:
        """Stored minus exact; None if one of them is not finite."""
        if self.stored is None or self.stored.value is None or self.exact.value is None:
            return None
        return self.stored.value - self.exact.value

    @property
    def relative_error(self) -> Fraction | None:
        """|error| / |exact|; None if there is no finite error, or exact is 0."""
        if self.error is None or not self.exact.value:
            return None
        return abs(self.error / self.exact.value)

    @property
    def spacings(self) -> tuple[Fraction | None, Fraction | None]:
        """Distances from the stored number to its neighbours."""
        middle = None if self.stored is None else self.stored.value
        ends = [None if end is None else end.value for end in (self.below, self.above)]
        below, above = (None if middle is None or end is None else abs(end - middle) for end in ends)
        return below, above

    @property
    def correct_digits(self) -> float | None:
        """Number of correct decimal digits: −log10 of the relative error; None if the number is exact."""
        relative = self.relative_error
        if not relative:
            return None
        return math.log10(relative.denominator) - math.log10(relative.numerator)

    def to_dict(self) -> dict[str, Any]:
        """As JSON, with exact decimals as text."""
        below, above = self.spacings
        error, relative = self.error, self.relative_error
        return {
            "bits": " ".join(self.bits),
            "stored": json_number(self.stored),
            "outcome": self.outcome.value,
            "error": None if error is None else short_decimal(error, 17),
            "relative_error": None if relative is None else short_decimal(relative, 17),
            "below": json_number(self.below),
            "above": json_number(self.above),
            "spacing_below": None if below is None else short_decimal(below, 17),
            "spacing_above": None if above is None else short_decimal(above, 17),
        }


@dataclass(frozen=True)
class StoredFloat(Stored):
    """A number in a floating-point format."""

    format: FloatFormat
    pattern: int

    @property
    def name(self) -> str:
        """The format's name."""
        return self.format.name

    @property
    def kind(self) -> Kind:
        """The kind of number that the pattern represents."""
        return self.format.kind(self.pattern)

    @property
    def word(self) -> str:
        """The pattern in memory, in hexadecimal."""
        width = self.format.num_bits + self.format.unused_bits
        return f"0x{self.pattern << self.format.unused_bits:0{width // 4}x}"

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {"format": self.name, "kind": self.kind.value, "word": self.word, **super().to_dict()}


@dataclass(frozen=True)
class StoredCode(Stored):
    """A number as a code of a few bits, relative to the largest magnitude of its block."""

    code: BlockCode
    place: int | None
    """Index of the level; None if the number cannot be stored."""
    absmax: Fraction

    @property
    def name(self) -> str:
        """The code's name."""
        return self.code.name

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        place = self.place
        return {
            "format": self.name,
            "code": None if place is None else self.code.first_code + place,
            "level": None if place is None else float(self.code.levels[place]),
            "absmax": short_decimal(self.absmax, 17),
            **super().to_dict(),
        }


def store_float(number: Number, format: FloatFormat) -> StoredFloat:
    """Rounds a number to a floating-point format: to nearest, ties to even.

    Example:
        >>> from trimtab.lab.numerics.formats import FORMATS
        >>> found = store_float(Number(Fraction("0.1")), FORMATS["bf16"])
        >>> found.bits, float(found.stored.value), found.outcome.value
        (('0', '01111011', '1001101'), 0.10009765625, 'rounded')
    """
    pattern = format.encode(number)
    text = format_bits(pattern, format.num_bits)
    cut = 1 + format.exponent_bits
    return StoredFloat(
        exact=number,
        stored=format.decode(pattern),
        below=format.neighbour(pattern, -1),
        above=format.neighbour(pattern, 1),
        outcome=_outcome(number, format, pattern),
        bits=(text[:1], text[1:cut], text[cut:]),
        format=format,
        pattern=pattern,
    )


def format_bits(pattern: int, width: int) -> str:
    """The binary digits of a pattern.

    Example:
        >>> format_bits(5, 8)
        '00000101'
    """
    return format(pattern, f"0{width}b")


def _outcome(number: Number, format: FloatFormat, pattern: int) -> StorageOutcome:
    stored = format.decode(pattern)
    if number.is_nan or stored.value == number.value:
        return StorageOutcome.EXACT
    if stored.value is None:
        return StorageOutcome.TO_INFINITY
    if number.value is None or (abs(stored.value) == format.largest and _is_beyond(number.value, format)):
        return StorageOutcome.SATURATED
    if stored.value == 0:
        return StorageOutcome.TO_ZERO
    return StorageOutcome.TIE if format.is_tie(number.value) else StorageOutcome.ROUNDED


def _is_beyond(value: Fraction, format: FloatFormat) -> bool:
    """Whether a number overflows: it would be rounded beyond the largest number."""
    return abs(value) > format.largest + format.spacing(format.largest) / 2


def store_code(number: Number, code: BlockCode, absmax: Fraction) -> StoredCode:
    """Rounds a number to a block code; absmax must be at least its magnitude.

    Example:
        >>> from trimtab.lab.numerics.block_codes import CODES
        >>> found = store_code(Number(Fraction("-0.3")), CODES["nf4"], Fraction(1))
        >>> found.bits, round(float(found.stored.value), 4)
        (('0100',), -0.2844)
    """
    if number.value is None:
        return StoredCode(number, None, None, None, StorageOutcome.NOT_STORED, ("",), code, None, absmax)
    assert abs(number.value) <= absmax, (number, absmax)
    place = code.nearest(number.value / absmax)
    level = [
        Number(code.levels[at] * absmax) if 0 <= at < len(code.levels) else None
        for at in (place - 1, place, place + 1)
    ]
    below, stored, above = level
    assert stored is not None
    lost = stored.value != number.value
    outcome = (
        StorageOutcome.EXACT
        if not lost
        else StorageOutcome.ROUNDED
        if stored.value
        else StorageOutcome.TO_ZERO
    )
    return StoredCode(number, stored, below, above, outcome, (code.bits(place),), code, place, absmax)
