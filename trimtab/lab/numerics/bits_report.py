"""The report on how each format stores a number."""

from __future__ import annotations

import math
from fractions import Fraction

from trimtab.facts.names import shortened
from trimtab.lab.numerics.bits import BitsStudy, NumberBits
from trimtab.lab.numerics.formats import FloatFormat, Kind, power_of_two
from trimtab.lab.numerics.number_text import exact_decimal, is_binary, short_decimal, show_number
from trimtab.lab.numerics.stored import StorageOutcome, Stored, StoredCode, StoredFloat
from trimtab.report.document import Block, Code, Document, LineChart, Section, Series, Table, Text

LONGEST_DECIMAL = 60
"""Digits of an exact decimal that are shown; the records have all of them."""
CHART_EXPONENTS = range(-28, 21, 4)


def bits_document(study: BitsStudy, command: str = "trimtab numerics bits") -> Document:
    """The report.

    Example:
        >>> from trimtab.lab.numerics.bits import study_bits
        >>> [section.title for section in bits_document(study_bits(["1/3"], ["fp16"])).sections]
        ['1/3', 'The formats']
    """
    sections = [Section(shortened(number.text), tuple(_number_blocks(number))) for number in study.numbers]
    facts = ("exact arithmetic", "rounded to nearest, ties to even")
    return Document("Dtypes, bit by bit", facts, (*sections, _formats_section(study)), command)


def _number_blocks(number: NumberBits) -> list[Block]:
    return [
        Text(_introduction(number)),
        Code("\n".join(line for row in number.rows for line in _bit_lines(row))),
        Table(
            "What is stored",
            ("format", "stored", "outcome", "error", "relative error", "correct digits", "loss"),
            tuple(_stored_row(row) for row in number.rows),
        ),
        Table(
            "Neighbours",
            ("format", "next below", "stored", "next above", "spacing below", "spacing above"),
            tuple(_neighbour_row(row) for row in number.rows),
            note=_spacing_note(number),
        ),
    ]


def _spacing_note(number: NumberBits) -> str:
    uneven = [row.name for row in number.floats if None not in row.spacings and len(set(row.spacings)) > 1]
    if not uneven:
        return ""
    return f"At a power of two the spacing changes, as it does here in {', '.join(uneven)}."


def _introduction(number: NumberBits) -> str:
    value = number.number.value
    if value is None:
        return (
            "Not a finite number: some floating-point formats have bit patterns for it; quantized blocks have no "
            "code for it."
        )
    stored = [row.name for row in number.floats if row.outcome is StorageOutcome.EXACT]
    exactness = (
        f"stored exactly by {', '.join(stored)}" if stored else "stored exactly by none of these formats"
    )
    # Compared by bit length: Python refuses to write integers of more than 4300 digits.
    if len(number.text) > 40 or value.numerator.bit_length() + value.denominator.bit_length() > 120:
        return f"The number is {exactness}."
    if str(value) == number.text:
        return f"{value} is a binary fraction, {exactness}."
    if not is_binary(value):
        return f"{number.text} = {value}: the denominator is not a power of two, so every binary format rounds it."
    return f"{number.text} = {value}: a binary fraction, {exactness}."


def _bit_lines(row: StoredFloat | StoredCode) -> list[str]:
    """The bit pattern, and its meaning."""
    if isinstance(row, StoredCode):
        if row.place is None:
            return [f"{row.name:10}no code"]
        level = short_decimal(row.code.levels[row.place], 9)
        meaning = (
            f"code {row.code.first_code + row.place}: level {level} × absmax {short_decimal(row.absmax, 9)}"
        )
        return [f"{row.name:10}{row.bits[0]}", f"{'':10}{meaning} = {show_number(row.stored)}"]
    unused = f"  ({row.format.unused_bits} unused bits)" if row.format.unused_bits else ""
    return [f"{row.name:10}{' '.join(row.bits)}  {row.word}{unused}", f"{'':10}{_meaning(row)}"]


def _meaning(row: StoredFloat) -> str:
    sign, exponent, mantissa = row.format.fields(row.pattern)
    shown = "-" if sign else "+"
    if row.kind in (Kind.ZERO, Kind.INFINITY, Kind.NAN):
        return f"{shown}{row.kind.value}" if row.kind is not Kind.NAN else "NaN"
    assert row.stored is not None
    assert row.stored.value is not None
    whole = 2**row.format.mantissa_bits
    if row.kind is Kind.SUBNORMAL:
        formula = f"2^{1 - row.format.bias} × {mantissa}/{whole} (subnormal)"
    else:
        formula = f"2^({exponent} - {row.format.bias}) × (1 + {mantissa}/{whole})"
    return f"{shown}{formula} = {_cut_decimal(row.stored.value)}"


def _cut_decimal(value: Fraction) -> str:
    """All digits of a number, or the first ones where there are many."""
    text = exact_decimal(value)
    digits = sum(character.isdigit() for character in text.partition("e")[0])
    if digits <= LONGEST_DECIMAL:
        return text
    return f"{short_decimal(value, 20)}… ({digits} digits)"


def _stored_row(row: StoredFloat | StoredCode) -> tuple[str, ...]:
    error, relative, digits = row.error, row.relative_error, row.correct_digits
    return (
        row.name,
        show_number(row.stored) or "none",
        row.outcome.value,
        "" if error is None else short_decimal(error),
        "" if relative is None else short_decimal(relative),
        "all" if row.error == 0 else "" if digits is None else f"{max(digits, 0.0):.1f}",
        describe_loss(row),
    )


def describe_loss(row: StoredFloat | StoredCode) -> str:
    """What a format loses of a number, in words.

    Example:
        >>> from trimtab.lab.numerics.bits import study_bits
        >>> describe_loss(study_bits(["1e6"], ["fp16"]).numbers[0].floats[0])
        'everything: the largest number is 65504'
    """
    if row.outcome is StorageOutcome.EXACT:
        if isinstance(row, StoredCode) and row.exact.value and abs(row.exact.value) == row.absmax:
            return "nothing: it is the largest magnitude of its block; --absmax shows it in another"
        return "nothing"
    if row.outcome is StorageOutcome.NOT_STORED:
        return "everything: a block that contains it has no scale"
    if isinstance(row, StoredCode):
        return (
            "everything: 0 is the nearest level"
            if row.outcome is StorageOutcome.TO_ZERO
            else _lost_share(row)
        )
    if row.outcome in (StorageOutcome.TO_INFINITY, StorageOutcome.SATURATED):
        word = "everything" if row.outcome is StorageOutcome.TO_INFINITY else "the size"
        return f"{word}: the largest number is {short_decimal(row.format.largest, 6)}"
    if row.outcome is StorageOutcome.TO_ZERO:
        smallest = short_decimal(row.format.smallest_subnormal, 3)
        return f"everything: at most half of the smallest number, {smallest}"
    if row.kind is Kind.SUBNORMAL:
        significant_bits = row.format.fields(row.pattern)[2].bit_length()
        return (
            f"{_lost_share(row)}; a subnormal with {significant_bits} of {row.format.mantissa_bits + 1} bits"
        )
    return _lost_share(row)


def _lost_share(row: Stored) -> str:
    """The error as a share of the spacing on its side; next to infinity, of that on the other side."""
    assert row.error is not None
    below, above = row.spacings
    spacing = (above or below) if row.error < 0 else (below or above)
    assert spacing is not None
    return f"{short_decimal(abs(row.error) / spacing, 2)} of the spacing"


def _neighbour_row(row: StoredFloat | StoredCode) -> tuple[str, ...]:
    spacings = ("" if spacing is None else short_decimal(spacing, 4) for spacing in row.spacings)
    return (
        row.name,
        show_number(row.below) or "none",
        show_number(row.stored) or "none",
        show_number(row.above) or "none",
        *spacings,
    )


def _formats_section(study: BitsStudy) -> Section:
    blocks: list[Block] = []
    if study.floats:
        blocks += [
            Table(
                "Floating-point formats",
                (
                    "format",
                    "bits",
                    "exponent",
                    "mantissa",
                    "largest",
                    "smallest normal",
                    "smallest subnormal",
                    "spacing at 1",
                    "decimal digits",
                    "on overflow",
                ),
                tuple(_format_row(float_format) for float_format in study.floats),
            ),
            Text(
                "Exponent bits decide the range, mantissa bits how close numbers lie. The spacing doubles at every "
                "power of two, so that the relative error of rounding is at most half of the spacing at 1 for every "
                "normal number; below the smallest normal one the spacing is constant and the relative error grows."
            ),
            _spacing_chart(study.floats),
        ]
    return Section("The formats", (*blocks, *_notes(study)))


def _format_row(float_format: FloatFormat) -> tuple[str, ...]:
    digits = f"{(float_format.mantissa_bits + 1) * math.log10(2):.1f}"
    return (
        float_format.name,
        str(float_format.num_bits),
        str(float_format.exponent_bits),
        str(float_format.mantissa_bits),
        short_decimal(float_format.largest, 5),
        short_decimal(float_format.smallest_normal, 4),
        short_decimal(float_format.smallest_subnormal, 4),
        short_decimal(float_format.epsilon, 4),
        digits,
        "infinity" if float_format.has_infinity else "the largest, or NaN",
    )


def _spacing_chart(formats: tuple[FloatFormat, ...]) -> LineChart:
    points = [power_of_two(exponent) for exponent in CHART_EXPONENTS]
    series = tuple(
        Series(
            float_format.name,
            tuple(
                (float(x), float(float_format.spacing(x)) if x <= float_format.largest else None)
                for x in points
            ),
        )
        for float_format in formats
    )
    return LineChart(
        "spacing",
        "Distance to the next number",
        "magnitude",
        "spacing",
        series,
        log_x=True,
        log_y=True,
        note="Lines end at the largest number and are level among subnormals.",
    )


def _notes(study: BitsStudy) -> list[Block]:
    names = [float_format.name for float_format in study.floats]
    notes: list[Block] = []
    if "tf32" in names:
        notes.append(
            Text(
                "tf32 has the bits that tensor cores read of fp32 operands, in a 32-bit word; sums stay fp32. Rounding "
                "depends on the instruction: to nearest even here, ties away from zero in PTX's cvt.rna.tf32."
            )
        )
    if "fp8_e4m3" in names:
        notes.append(
            Text(
                "fp8_e4m3 (torch's float8_e4m3fn) has no infinity. Its specification allows conversions that "
                "saturate, as shown here and as torch 2.13 does, and conversions to NaN, as earlier versions did. "
                "Scale a tensor into the range before it is cast."
            )
        )
    for code in study.codes:
        if code.name == "nf4":
            levels = " ".join(f"{float(level):+.4f}" for level in code.levels)
            notes += [
                Text(
                    "nf4 stores the index of the level, of 16, that is nearest to value / absmax; absmax is the "
                    f"largest magnitude of the block ({short_decimal(study.absmax, 9)} here). Levels are quantiles "
                    "of a normal distribution, dense where weights are."
                ),
                Code(levels),
            ]
        if code.name == "int8":
            notes.append(
                Text(
                    "int8 stores round(127 · value / absmax): 255 equally spaced levels; absmax is that of a block or "
                    "a row."
                )
            )
    return notes
