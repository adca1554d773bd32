"""Floating-point formats from their definition: bits to numbers and numbers to bits, in exact arithmetic. No torch.

A pattern is sign, exponent field e and mantissa field f of m bits. With bias b it represents

    (−1)^sign · 2^(e − b) · (1 + f / 2^m)        normal, e > 0
    (−1)^sign · 2^(1 − b) · f / 2^m              subnormal, e = 0

The largest e is reserved for infinities and NaN; fp8_e4m3 has no infinity and uses it for numbers, except for one NaN
pattern of each sign. Without their sign, the patterns of finite numbers are in the order of the numbers.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from trimtab.facts.dtypes import dtype_alias
from trimtab.facts.errors import RecipeError
from trimtab.facts.names import shortened


class Kind(enum.Enum):
    """The kind of number that a pattern represents."""

    ZERO = "zero"
    SUBNORMAL = "subnormal"
    NORMAL = "normal"
    INFINITY = "infinity"
    NAN = "NaN"


@dataclass(frozen=True)
class Number:
    """A real number, an infinity or NaN; zero has a sign too.

    Example:
        >>> Number(Fraction(-3, 2)).value, Number.infinity(negative=True).value
        (Fraction(-3, 2), None)
    """

    value: Fraction | None
    """None for infinities and NaN."""
    negative: bool = False
    """Sign of zero, infinities and NaN; other numbers have their own sign."""
    is_nan: bool = False

    @staticmethod
    def infinity(*, negative: bool = False) -> Number:
        """±∞."""
        return Number(None, negative)

    @staticmethod
    def nan(*, negative: bool = False) -> Number:
        """Not a number."""
        return Number(None, negative, is_nan=True)

    @property
    def sign_bit(self) -> int:
        """1 for negative numbers, −0 included."""
        return int(self.value < 0 if self.value else self.negative)


@dataclass(frozen=True)
class FloatFormat:
    """A binary floating-point format.

    Example:
        >>> fp16 = FORMATS["fp16"]
        >>> pattern = fp16.encode(Number(Fraction(1, 10)))
        >>> hex(pattern), float(fp16.decode(pattern).value), float(fp16.largest)
        ('0x2e66', 0.0999755859375, 65504.0)
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    has_infinity: bool = True
    """If False, one pattern of each sign is NaN, and overflow saturates to the largest number."""
    unused_bits: int = 0
    """Number of unused low bits of its word in memory."""

    @property
    def num_bits(self) -> int:
        """Number of bits: sign, exponent and mantissa."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        """The bias of the exponent field."""
        return 2 ** (self.exponent_bits - 1) - 1

    @property
    def largest_pattern(self) -> int:
        """Pattern of the largest number, without sign."""
        all_ones = 2 ** (self.num_bits - 1) - 1
        return all_ones - 2**self.mantissa_bits if self.has_infinity else all_ones - 1

    @property
    def largest(self) -> Fraction:
        """The largest number."""
        return self._magnitude(self.largest_pattern)

    @property
    def smallest_normal(self) -> Fraction:
        """The smallest positive normal number."""
        return power_of_two(1 - self.bias)

    @property
    def smallest_subnormal(self) -> Fraction:
        """The smallest positive number."""
        return power_of_two(1 - self.bias - self.mantissa_bits)

    @property
    def epsilon(self) -> Fraction:
        """Spacing from 1 to the next number."""
        return power_of_two(-self.mantissa_bits)

    def spacing(self, magnitude: Fraction) -> Fraction:
        """Distance to the next larger number at a magnitude; beyond the largest number the exponent continues.

        Example:
            >>> [str(FORMATS["bf16"].spacing(Fraction(x))) for x in (1, 4, 100)]
            ['1/128', '1/32', '1/2']
        """
        exponent = max(floor_log2(magnitude), 1 - self.bias) if magnitude else 1 - self.bias
        return power_of_two(exponent - self.mantissa_bits)

    def fields(self, pattern: int) -> tuple[int, int, int]:
        """Sign, exponent and mantissa of a pattern."""
        mantissa = pattern & (2**self.mantissa_bits - 1)
        exponent = pattern >> self.mantissa_bits & (2**self.exponent_bits - 1)
        return pattern >> (self.num_bits - 1), exponent, mantissa

    def kind(self, pattern: int) -> Kind:
        """The kind of number that a pattern represents."""
        magnitude = pattern & (2 ** (self.num_bits - 1) - 1)
        if magnitude > self.largest_pattern:
            infinite = self.has_infinity and magnitude == self.largest_pattern + 1
            return Kind.INFINITY if infinite else Kind.NAN
        if magnitude < 2**self.mantissa_bits:
            return Kind.SUBNORMAL if magnitude else Kind.ZERO
        return Kind.NORMAL

    def decode(self, pattern: int) -> Number:
        """The number of a pattern.

        Example:
            >>> FORMATS["fp8_e4m3"].decode(0b0_1111_110).value
            Fraction(448, 1)
        """
        negative, kind = bool(self.fields(pattern)[0]), self.kind(pattern)
        if kind is Kind.NAN:
            return Number.nan(negative=negative)
        if kind is Kind.INFINITY:
            return Number.infinity(negative=negative)
        magnitude = self._magnitude(pattern & (2 ** (self.num_bits - 1) - 1))
        return Number(-magnitude if negative else magnitude, negative)

    def encode(self, number: Number) -> int:
        """The pattern of the nearest number; ties are rounded to an even mantissa.

        Example:
            >>> FORMATS["fp16"].decode(FORMATS["fp16"].encode(Number(Fraction(2049)))).value  # 2048 or 2050
            Fraction(2048, 1)
        """
        sign = number.sign_bit << (self.num_bits - 1)
        if number.is_nan:
            quiet = 2 ** max(self.mantissa_bits - 1, 0) if self.has_infinity else 0
            return sign | (self.largest_pattern + 1 + quiet)
        if number.value is None:
            return sign | self._overflow_pattern()
        nearest = round(self._position(abs(number.value)))
        return sign | (nearest if nearest <= self.largest_pattern else self._overflow_pattern())

    def round(self, value: Fraction) -> Number:
        """The nearest number of the format.

        Example:
            >>> FORMATS["bf16"].round(Fraction(1, 100)).value
            Fraction(41, 4096)
        """
        return self.decode(self.encode(Number(value)))

    def is_tie(self, value: Fraction) -> bool:
        """Whether a number is exactly halfway between two numbers of the format."""
        position = self._position(abs(value))
        return position.denominator == 2 and position < self.largest_pattern + 1

    def neighbour(self, pattern: int, step: int) -> Number | None:
        """The next number above (step 1) or below (step −1) that of a pattern; None where there is none.

        Example:
            >>> fp16 = FORMATS["fp16"]
            >>> fp16.neighbour(fp16.encode(Number(Fraction(1))), -1).value
            Fraction(2047, 2048)
        """
        if self.kind(pattern) is Kind.NAN:
            return None
        magnitude = pattern & (2 ** (self.num_bits - 1) - 1)
        order = (-magnitude if pattern != magnitude else magnitude) + step
        if abs(order) > self.largest_pattern + self.has_infinity:
            return None
        return self.decode(abs(order) | (order < 0) << (self.num_bits - 1))

    def _overflow_pattern(self) -> int:
        """Infinity or, where there is none, the largest number."""
        return self.largest_pattern + self.has_infinity

    def _position(self, magnitude: Fraction) -> Fraction:
        """The pattern of a magnitude, interpolated between two patterns if it is no number of the format."""
        if not magnitude:
            return magnitude
        binade = max(floor_log2(magnitude) - (1 - self.bias), 0)
        return magnitude / self.spacing(magnitude) + binade * 2**self.mantissa_bits

    def _magnitude(self, pattern: int) -> Fraction:
        """The number of a finite pattern without sign."""
        exponent, mantissa = divmod(pattern, 2**self.mantissa_bits)
        if exponent:
            mantissa += 2**self.mantissa_bits
        return mantissa * power_of_two(max(exponent, 1) - self.bias - self.mantissa_bits)


FORMATS = {
    float_format.name: float_format
    for float_format in (
        FloatFormat("fp64", 11, 52),
        FloatFormat("fp32", 8, 23),
        FloatFormat("tf32", 8, 10, unused_bits=13),
        FloatFormat("fp16", 5, 10),
        FloatFormat("bf16", 8, 7),
        FloatFormat("fp8_e4m3", 4, 3, has_infinity=False),
        FloatFormat("fp8_e5m2", 5, 2),
    )
}
"""Formats by name. tf32 is the precision in which tensor cores read fp32 operands; it is no storage format."""


def power_of_two(exponent: int) -> Fraction:
    """2^exponent, exactly.

    Example:
        >>> power_of_two(-3)
        Fraction(1, 8)
    """
    return Fraction(2**exponent) if exponent >= 0 else Fraction(1, 2**-exponent)


def floor_log2(magnitude: Fraction) -> int:
    """The largest n with 2^n ≤ magnitude, for a positive magnitude.

    Example:
        >>> floor_log2(Fraction(1)), floor_log2(Fraction(1, 3)), floor_log2(Fraction(1023))
        (0, -2, 9)
    """
    guess = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    return guess if power_of_two(guess) <= magnitude else guess - 1


def find_format(name: str) -> FloatFormat:
    """The floating-point format of a name; raises RecipeError with the nearest name if there is none.

    Example:
        >>> find_format("bf16").num_bits
        16
    """
    if name not in FORMATS:
        raise unknown_format(name, FORMATS)
    return FORMATS[name]


def unknown_format(name: str, known: Iterable[str]) -> RecipeError:
    """The error for an unknown format, with the nearest name.

    Example:
        >>> str(unknown_format("fp17", ["fp16", "bf16"]))
        "there is no format 'fp17'; did you mean fp16? the formats are fp16, bf16"
    """
    names = list(known)
    near = difflib.get_close_matches(str(dtype_alias(name)), names, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? " if near else ""
    return RecipeError(f"there is no format '{shortened(name)}'", f"{hint}the formats are {', '.join(names)}")
