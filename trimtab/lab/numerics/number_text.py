"""Parses numbers exactly, and formats them for tables. Imports no torch."""

from __future__ import annotations

import re
from decimal import ROUND_HALF_EVEN, ROUND_UP, Context, Decimal
from fractions import Fraction

from trimtab.facts.errors import RecipeError
from trimtab.facts.names import shortened
from trimtab.lab.numerics.formats import Number, find_format, power_of_two

LONGEST = 1000
"""Maximum number of characters of a number."""
LARGEST_EXPONENT = 5000
"""Maximum exponent of ten or two; no format reaches a tenth of it."""

_DECIMAL = re.compile(r"[+-]?([0-9][0-9_]*\.?[0-9]*|\.[0-9]+)(e(?P<exponent>[+-]?[0-9]+))?", re.IGNORECASE)
_RATIO = re.compile(r"[+-]?[0-9]+/[0-9]*[1-9][0-9]*")
_HEX = re.compile(
    r"(?P<sign>[+-]?)0x(?P<whole>[0-9a-f]*)(\.(?P<part>[0-9a-f]*))?(p(?P<exponent>[+-]?[0-9]+))?",
    re.IGNORECASE,
)
_WORD = re.compile(r"(?P<sign>[+-]?)(?P<word>nan|inf|infinity)", re.IGNORECASE)
_PATTERN = re.compile(r"(?P<format>\w+):(?P<bits>0x[0-9a-f]+|0b[01_]+)", re.IGNORECASE)

_EXACT = Context(prec=20_000, Emax=999_999, Emin=-999_999)


def parse_number(text: str) -> Number:
    """Parses a number exactly.

    Accepts decimals, ratios, hexadecimal numbers as in C and Python, inf, nan, and the bits of a format, such as
    `fp16:0x3c00`. Raises RecipeError for anything else.

    Example:
        >>> parse_number("0.1").value, parse_number("0x1.8p3").value, parse_number("bf16:0x3f80").value
        (Fraction(1, 10), Fraction(12, 1), Fraction(1, 1))
    """
    plain = text.strip()
    if len(plain) > LONGEST:
        raise RecipeError(
            f"a number has {len(plain):,} characters, which is too long", f"use at most {LONGEST} characters"
        )
    negative = plain.startswith("-")
    if match := _WORD.fullmatch(plain):
        word = match["word"].lower()
        return Number.nan(negative=negative) if word == "nan" else Number.infinity(negative=negative)
    if match := _PATTERN.fullmatch(plain):
        return _stored(match["format"], match["bits"])
    if match := _DECIMAL.fullmatch(plain):
        _check_exponent(plain, match["exponent"])
        return Number(Fraction(plain.replace("_", "")), negative)
    if _RATIO.fullmatch(plain):
        return Number(Fraction(plain), negative)
    if (match := _HEX.fullmatch(plain)) and (match["whole"] or match["part"]):
        _check_exponent(plain, match["exponent"])
        digits, part = match["whole"] + (match["part"] or ""), match["part"] or ""
        value = int(digits, 16) * power_of_two(int(match["exponent"] or 0) - 4 * len(part))
        return Number(-value if negative else value, negative)
    raise RecipeError(
        f"'{shortened(text)}' is not a number",
        "write it as 3.14, 1e-8, 1/3, 0x1.8p3, inf or nan, or write the bits of a format as fp16:0x3c00",
    )


def _check_exponent(text: str, exponent: str | None) -> None:
    if exponent is not None and (len(exponent) > 8 or abs(int(exponent)) > LARGEST_EXPONENT):
        raise RecipeError(
            f"the exponent of '{shortened(text)}' is outside the range of every format",
            f"use one between -{LARGEST_EXPONENT} and {LARGEST_EXPONENT}",
        )


def _stored(name: str, bits: str) -> Number:
    float_format, pattern = find_format(name), int(bits, 0)
    width = float_format.num_bits + float_format.unused_bits
    if pattern >= 2**width:
        raise RecipeError(f"{name} has {width} bits, but {bits} has more", f"use at most {width} bits")
    return float_format.decode(pattern >> float_format.unused_bits)


def exact_decimal(value: Fraction) -> str:
    """All digits of a number whose denominator is a power of two.

    Example:
        >>> exact_decimal(Fraction(3, 8)), exact_decimal(Fraction(1, 2**20)), exact_decimal(Fraction(-65504))
        ('0.375', '9.5367431640625e-7', '-65504')
    """
    quotient = _EXACT.divide(Decimal(value.numerator), Decimal(value.denominator))
    assert Fraction(quotient) == value, value
    return _written(quotient)


def short_decimal(value: Fraction, digits: int = 4, *, up: bool = False) -> str:
    """A number with a few significant digits; rounded away from zero if `up`.

    Example:
        >>> short_decimal(Fraction(2, 3)), short_decimal(Fraction(1, 3 * 10**50)), short_decimal(Fraction(65504), 6)
        ('0.6667', '3.333e-51', '65504')
    """
    rounding = ROUND_UP if up else ROUND_HALF_EVEN
    context = Context(prec=digits, rounding=rounding, Emax=999_999, Emin=-999_999)
    return _written(context.divide(Decimal(value.numerator), Decimal(value.denominator)))


def _written(quotient: Decimal) -> str:
    """Formats a decimal without trailing zeros, with an exponent if there would be many zeros."""
    if not quotient:
        return "0"
    plain = quotient.normalize(_EXACT)
    if -5 <= plain.adjusted() < 21:
        return f"{plain:f}"
    return f"{plain:e}".replace("e+", "e")


def show_number(number: Number | None, digits: int = 9) -> str:
    """A number in a table: with `digits` significant digits, or as a word; None is empty.

    Example:
        >>> show_number(Number(Fraction(0), negative=True)), show_number(Number.infinity()), show_number(None)
        ('-0', 'inf', '')
    """
    if number is None:
        return ""
    if number.value:
        return short_decimal(number.value, digits)
    word = "nan" if number.is_nan else "inf" if number.value is None else "0"
    return "-" * number.negative + word


def json_number(number: Number | None) -> str | None:
    """A number in JSON, as text: all its digits (17 for a non-terminating decimal), or a word.

    Example:
        >>> json_number(Number(Fraction(1, 4))), json_number(Number.nan()), json_number(None)
        ('0.25', 'nan', None)
    """
    if number is None:
        return None
    if not number.value:
        return show_number(number)
    return exact_decimal(number.value) if is_binary(number.value) else short_decimal(number.value, 17)


def is_binary(value: Fraction) -> bool:
    """Whether a number is a binary fraction: its denominator is a power of two.

    Example:
        >>> is_binary(Fraction(3, 8)), is_binary(Fraction(1, 10))
        (True, False)
    """
    return value.denominator & (value.denominator - 1) == 0
