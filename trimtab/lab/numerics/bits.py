"""Numbers in each format, bit by bit. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from trimtab.facts.errors import RecipeError
from trimtab.lab.numerics.block_codes import CODES, BlockCode
from trimtab.lab.numerics.formats import FORMATS, FloatFormat, Number, unknown_format
from trimtab.lab.numerics.number_text import parse_number, short_decimal
from trimtab.lab.numerics.stored import StoredCode, StoredFloat, store_code, store_float

DEFAULT_FORMATS = ("fp32", "tf32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2", "nf4", "int8")
KNOWN_FORMATS = (*FORMATS, *CODES)


@dataclass(frozen=True)
class NumberBits:
    """One number in every format."""

    text: str
    number: Number
    floats: tuple[StoredFloat, ...]
    codes: tuple[StoredCode, ...]

    @property
    def rows(self) -> tuple[StoredFloat | StoredCode, ...]:
        """The number in floating-point formats, then in block codes."""
        return (*self.floats, *self.codes)

    def to_dict(self) -> dict[str, Any]:
        """As one JSON record."""
        return {"value": self.text, "formats": [row.to_dict() for row in self.rows]}


@dataclass(frozen=True)
class BitsStudy:
    """Several numbers in several formats."""

    numbers: tuple[NumberBits, ...]
    floats: tuple[FloatFormat, ...]
    codes: tuple[BlockCode, ...]
    absmax: Fraction
    """Largest magnitude of the block that the codes belong to."""

    def records(self) -> list[dict[str, Any]]:
        """One JSON record for each number."""
        return [number.to_dict() for number in self.numbers]


def study_bits(
    values: Sequence[str], formats: Sequence[str] = DEFAULT_FORMATS, absmax: str | None = None
) -> BitsStudy:
    """Rounds numbers to several formats.

    Args:
        values: numbers as text: "3.14", "1e-8", "1/3", "0x1.8p3", "inf", "fp16:0x3c00".
        formats: names from KNOWN_FORMATS.
        absmax: largest magnitude of the block that nf4 and int8 codes belong to; by default 1, or the largest
            magnitude among the values if that is more.

    Example:
        >>> found = study_bits(["3.14"], ["fp16"])
        >>> found.numbers[0].floats[0].word, float(found.numbers[0].floats[0].stored.value)
        ('0x4248', 3.140625)
    """
    if not values:
        raise RecipeError("no number is given", "give one or more, as `trimtab numerics bits 3.14`")
    names = list(dict.fromkeys(formats))
    if not names:
        raise RecipeError("no format is named", f"name some of {', '.join(KNOWN_FORMATS)}")
    for name in names:
        if name not in KNOWN_FORMATS:
            raise unknown_format(name, KNOWN_FORMATS)
    numbers = [parse_number(value) for value in values]
    largest = _block_absmax(numbers, absmax)
    floats = tuple(FORMATS[name] for name in names if name in FORMATS)
    codes = tuple(CODES[name] for name in names if name in CODES)
    stored = tuple(
        NumberBits(
            text.strip(),
            number,
            tuple(store_float(number, float_format) for float_format in floats),
            tuple(store_code(number, code, largest) for code in codes),
        )
        for text, number in zip(values, numbers, strict=True)
    )
    return BitsStudy(stored, floats, codes, largest)


def _block_absmax(numbers: Sequence[Number], given: str | None) -> Fraction:
    largest = max((abs(number.value) for number in numbers if number.value is not None), default=Fraction(0))
    if given is None:
        return max(largest, Fraction(1))
    absmax = parse_number(given).value
    if absmax is None or absmax < largest or not absmax:
        raise RecipeError(
            f"--absmax {given.strip()} is not the largest magnitude of a block with these values",
            f"give a number above 0 that is at least {short_decimal(largest, 9, up=True)}",
        )
    return absmax
