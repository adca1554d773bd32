"""Dtypes in exact arithmetic, compared bit by bit with torch, numpy and Python, and the command's output."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from command import call
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.facts.errors import RecipeError
from trimtab.kernels import int8, nf4
from trimtab.lab.numerics.bits import study_bits
from trimtab.lab.numerics.bits_report import bits_document, describe_loss
from trimtab.lab.numerics.block_codes import CODES
from trimtab.lab.numerics.formats import FORMATS, FloatFormat, Kind, Number
from trimtab.lab.numerics.number_text import exact_decimal, parse_number, short_decimal, show_number
from trimtab.lab.numerics.stored import StorageOutcome, StoredFloat, store_code, store_float
from trimtab.report.document import Code, LineChart, Table

TORCH = {
    "fp16": (torch.float16, torch.uint16),
    "bf16": (torch.bfloat16, torch.uint16),
    "fp8_e4m3": (torch.float8_e4m3fn, torch.uint8),
    "fp8_e5m2": (torch.float8_e5m2, torch.uint8),
}


def torch_patterns(name: str, values: list[float]) -> list[int]:
    """How torch casts fp32 numbers."""
    dtype, word = TORCH[name]
    return torch.tensor(values, dtype=torch.float32).to(dtype).view(word).to(torch.int32).tolist()


def check_cast(name: str, value: float, pattern: int) -> None:
    """Our pattern of an fp32 number is torch's."""
    found = FORMATS[name]
    ours = found.encode(Number(Fraction(value)))
    if name == "fp8_e4m3" and abs(value) > 464:  # torch 2.13 saturates, older versions gave NaN
        assert ours & 0x7F == 0x7E
        assert pattern & 0x7F in (0x7E, 0x7F)
        assert ours >> 7 == pattern >> 7
    else:
        assert ours == pattern, (name, value, hex(ours), hex(pattern))


@pytest.mark.parametrize("name", TORCH)
def test_every_pattern_decodes_as_in_torch_and_encodes_to_itself(name: str) -> None:
    found, (dtype, word) = FORMATS[name], TORCH[name]
    patterns = torch.arange(2**found.num_bits, dtype=torch.int32).to(word)
    for pattern, value in enumerate(patterns.view(dtype).double().tolist()):
        ours = found.decode(pattern)
        if math.isnan(value):
            assert ours.is_nan
            assert found.kind(pattern) is Kind.NAN
        elif math.isinf(value):
            assert ours.value is None
            assert not ours.is_nan
            assert ours.sign_bit == (value < 0)
        else:
            assert ours.value == Fraction(value)
            assert ours.sign_bit == (math.copysign(1.0, value) < 0)
            assert found.encode(ours) == pattern


@pytest.mark.parametrize("name", TORCH)
def test_numbers_between_are_rounded_as_torch_does(name: str) -> None:
    found = FORMATS[name]
    generator = torch.Generator().manual_seed(0)
    exponents = torch.empty(1500).uniform_(
        math.log2(found.smallest_subnormal) - 2, math.log2(found.largest) + 1, generator=generator
    )
    signs = torch.where(torch.rand(1500, generator=generator) < 0.5, -1.0, 1.0)
    values = (signs * exponents.clamp(-148, 127).exp2()).tolist()
    for value, pattern in zip(values, torch_patterns(name, values), strict=True):
        check_cast(name, value, pattern)


@pytest.mark.parametrize("name", TORCH)
def test_ties_go_to_even_as_in_torch(name: str) -> None:
    """All midpoints of 8-bit formats, many of 16-bit ones; each one is an fp32 number."""
    found = FORMATS[name]
    stride = max(1, found.largest_pattern // 500)
    patterns = [*range(0, found.largest_pattern, stride), found.largest_pattern - 1]
    values = [found._magnitude(p) / 2 + found._magnitude(p + 1) / 2 for p in patterns]
    kept = [value for value in values if Fraction(np.float32(float(value)).item()) == value]
    assert len(kept) > 0.9 * len(values)
    plain = [float(value) for value in kept]
    for value, pattern in zip(plain, torch_patterns(name, plain), strict=True):
        check_cast(name, value, pattern)
        assert found.is_tie(Fraction(value))
        assert found.encode(Number(Fraction(value))) % 2 == 0


@settings(max_examples=150)
@given(st.decimals(Decimal("-1e310"), Decimal("1e310"), allow_nan=False))
def test_decimals_become_the_floats_that_python_reads(decimal: object) -> None:
    text = str(decimal)
    pattern = FORMATS["fp64"].encode(parse_number(text))
    assert pattern == int.from_bytes(struct.pack(">d", float(text)), "big")


@settings(max_examples=150)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_tf32_is_fp32_without_its_last_13_bits(value: float) -> None:
    word = int.from_bytes(struct.pack(">f", value), "big")
    nearest = (word + 0xFFF + (word >> 13 & 1)) >> 13
    row = store_float(Number(Fraction(value), math.copysign(1, value) < 0), FORMATS["tf32"])
    assert row.pattern == nearest
    assert row.word == f"0x{nearest << 13:08x}"


@settings(max_examples=100)
@given(st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(["fp16", "fp32", "fp64"]))
def test_neighbours_are_numpys(value: float, name: str) -> None:
    kind = {"fp16": np.float16, "fp32": np.float32, "fp64": np.float64}[name]
    row = store_float(Number(Fraction(value)), FORMATS[name])
    with np.errstate(over="ignore"):
        own = kind(value)  # numpy rounds fp64 once, to nearest even
    assert row.stored is not None
    assert row.stored.value == (None if math.isinf(own) else Fraction(float(own)))
    for found, towards in ((row.below, -np.inf), (row.above, np.inf)):
        with np.errstate(over="ignore"):
            next_one = float(np.nextafter(own, kind(towards)))
        if found is None:
            assert next_one == own == kind(towards)
        else:
            expected = None if math.isinf(next_one) else Fraction(next_one)
            assert found.value == expected


@pytest.mark.parametrize(
    ("name", "value", "stored", "outcome"),
    [
        ("fp16", "65519.99", "65504", StorageOutcome.ROUNDED),
        ("fp16", "65520", "inf", StorageOutcome.TO_INFINITY),
        ("fp16", "-1e400", "-inf", StorageOutcome.TO_INFINITY),
        ("fp16", "6e-8", "5.96046448e-8", StorageOutcome.ROUNDED),
        ("fp16", "0x1p-25", "0", StorageOutcome.TO_ZERO),  # half of the smallest: a tie, and 0 is even
        ("fp16", "-2.9e-8", "-0", StorageOutcome.TO_ZERO),
        ("fp16", "2049", "2048", StorageOutcome.TIE),
        ("fp16", "2051", "2052", StorageOutcome.TIE),
        ("bf16", "1e39", "inf", StorageOutcome.TO_INFINITY),
        ("bf16", "65520", "65536", StorageOutcome.ROUNDED),
        ("fp8_e4m3", "464", "448", StorageOutcome.TIE),
        ("fp8_e4m3", "465", "448", StorageOutcome.SATURATED),
        ("fp8_e4m3", "-inf", "-448", StorageOutcome.SATURATED),
        ("fp8_e5m2", "61440", "inf", StorageOutcome.TO_INFINITY),
        ("fp8_e5m2", "61439", "57344", StorageOutcome.ROUNDED),
        ("fp32", "nan", "nan", StorageOutcome.EXACT),
        ("fp8_e4m3", "nan", "nan", StorageOutcome.EXACT),
        ("fp32", "-inf", "-inf", StorageOutcome.EXACT),
        ("fp32", "-0", "-0", StorageOutcome.EXACT),
        ("fp32", "0.5", "0.5", StorageOutcome.EXACT),
        ("fp64", "0x1.8p-1074", "9.88131292e-324", StorageOutcome.TIE),
    ],
)
def test_edges(name: str, value: str, stored: str, outcome: StorageOutcome) -> None:
    row = study_bits([value], [name]).numbers[0].floats[0]
    assert (show_number(row.stored), row.outcome) == (stored, outcome)
    assert describe_loss(row)


def test_the_definitions_are_torchs() -> None:
    types = {"fp64": torch.float64, "fp32": torch.float32} | {name: pair[0] for name, pair in TORCH.items()}
    for name, dtype in types.items():
        found, theirs = FORMATS[name], torch.finfo(dtype)
        assert found.largest == Fraction(theirs.max)
        assert found.smallest_normal == Fraction(theirs.smallest_normal)
        assert found.epsilon == Fraction(theirs.eps)
        assert found.num_bits == theirs.bits
    assert FloatFormat("x", 5, 10).bias == 15


def test_numbers_are_read_exactly() -> None:
    assert parse_number("1_000.5").value == Fraction(2001, 2)
    assert parse_number(" -1/3 ").value == Fraction(-1, 3)
    assert parse_number("0x1.999999999999ap-4").value == Fraction(0.1)
    assert parse_number("-0X10").value == -16
    assert parse_number(".5e1").value == 5
    assert parse_number("fp16:0b0_01111_0000000000").value == 1
    assert parse_number("tf32:0x3f800000").value == 1
    assert parse_number("fp8_e4m3:0x7f").is_nan
    assert parse_number("-Infinity") == Number.infinity(negative=True)
    assert parse_number("1e5000").value == 10**5000


@pytest.mark.parametrize(
    "text",
    ["", "abc", "1e", "1,5", "1/0", "0x", "0xp3", "--1", "1__0_", "٣", "fp16:3c00", "nan1", "0x1.8p", "1 2"],
)
def test_non_numbers_are_rejected(text: str) -> None:
    if text == "1__0_":  # underscores group digits, however many
        assert parse_number(text).value == 10
        return
    with pytest.raises(RecipeError, match="is not a number; write it as"):
        parse_number(text)


def test_huge_numbers_are_rejected_immediately() -> None:
    for text, said in (
        ("1e999999999999", "outside the range of every format"),
        ("0x1p-5001", "outside the range of every format"),
        ("9" * 5000, "5,000 characters"),
        ("fp16:0x10000", "fp16 has 16 bits"),
        ("fp17:0x1", "did you mean fp16"),
    ):
        with pytest.raises(RecipeError, match=said):
            parse_number(text)


def test_decimals_are_written_in_full() -> None:
    assert exact_decimal(Fraction(0.1)) == "0.1000000000000000055511151231257827021181583404541015625"
    assert exact_decimal(FORMATS["fp32"].smallest_subnormal).startswith("1.40129846432481707092372958")
    assert len(exact_decimal(FORMATS["fp64"].smallest_subnormal)) > 750
    assert short_decimal(Fraction(1, 3), 3, up=True) == "0.334"


def test_block_codes_are_those_of_the_kernels() -> None:
    generator = torch.Generator().manual_seed(0)
    x_N = torch.rand(256, generator=generator) * 2 - 1
    x_N[0] = -1.0
    packed = nf4.quantize(x_N, block=256, double=False).codes
    codes = torch.stack((packed >> 4, packed & 15), 1).flatten().tolist()
    int8_codes = int8.quantize(x_N, granularity="tensor").codes.tolist()
    for value, code, int8_code in zip(x_N.tolist(), codes, int8_codes, strict=True):
        number = Number(Fraction(value))
        assert store_code(number, CODES["nf4"], Fraction(1)).place == code
        row = store_code(number, CODES["int8"], Fraction(1))
        assert row.place is not None
        assert row.place - 127 == int8_code
        assert row.bits[0] == format(int8_code & 0xFF, "08b")


def test_the_largest_magnitude_of_a_block_is_exact_and_the_report_says_why() -> None:
    found = study_bits(["3.14", "-1"], ["nf4", "fp16"]).numbers
    assert describe_loss(found[0].codes[0]) == (
        "nothing: it is the largest magnitude of its block; --absmax shows it in another"
    )
    assert "of the spacing" in describe_loss(found[1].codes[0])
    assert describe_loss(study_bits(["3.14"], ["nf4"], "5").numbers[0].codes[0]) != "nothing"
    assert describe_loss(study_bits(["0"], ["nf4"]).numbers[0].codes[0]) == "nothing"


def test_a_block_has_a_largest_magnitude() -> None:
    found = study_bits(["0.25", "-2"], ["nf4", "int8"])
    assert found.absmax == 2
    assert found.numbers[1].codes[0].outcome is StorageOutcome.EXACT
    assert found.numbers[1].codes[1].bits == ("10000001",)
    assert study_bits(["0.25"], ["nf4"]).absmax == 1
    assert study_bits(["nan"], ["nf4"]).numbers[0].codes[0].outcome is StorageOutcome.NOT_STORED
    for absmax in ("1", "0", "nan", "inf"):
        with pytest.raises(RecipeError, match="at least 2"):
            study_bits(["2"], ["nf4"], absmax)
    study_bits(["1/3"], ["nf4"], "0.333333334")  # what the error for 0.3 names


def test_the_report_has_patterns_neighbours_and_a_chart() -> None:
    document = bits_document(study_bits(["0.1", "1e-7", "nan", "1e9"]))
    first = document.sections[0].blocks
    code = next(block for block in first if isinstance(block, Code))
    assert "0 01111011 10011001100110011001101  0x3dcccccd" in code.text
    assert "= 0.100000001490116119384765625" in code.text
    tables = [block for block in first if isinstance(block, Table)]
    assert {len(row) for table in tables for row in table.rows} == {7, 6}
    chart = next(block for block in document.sections[-1].blocks if isinstance(block, LineChart))
    fp16 = next(series for series in chart.series if series.name == "fp16")
    assert fp16.points[-1][1] is None, "beyond the largest number there is none"
    subnormal = document.sections[1].blocks[2]
    assert isinstance(subnormal, Table)
    assert any("a subnormal with 2 of 11 bits" in row[-1] for row in subnormal.rows)


def test_the_command_line(tmp_path: Path) -> None:
    code, shown = call("numerics", "bits", "-1.5", "-inf", "--formats", "fp16,nf4", "--json")
    assert code == 0, shown
    found = json.loads(shown)["records"]
    assert [record["value"] for record in found] == ["-1.5", "-inf"]
    assert found[0]["formats"][0]["word"] == "0xbe00"
    assert found[0]["formats"][1]["absmax"] == "1.5"
    code, shown = call("numerics", "bits", "1e5000", "-1e-5000", "1" * 1000, "--formats", "fp64,int8")
    assert code == 0, shown
    code, shown = call("numerics", "bits", "3.14", "--out", tmp_path / "a" / "b")
    assert code == 0, shown
    assert "3.1400001049041748046875" in shown
    record = json.loads((tmp_path / "a" / "b" / "records.jsonl").read_text())
    assert record["study"] == "numerics bits"
    assert record["commit"]
    assert "3.1400001049041748046875" in (tmp_path / "a" / "b" / "report.md").read_text()


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    for place in (tmp_path / "taken", tmp_path / "taken" / "below"):
        code, shown = call("numerics", "bits", "1", "--out", place)
        assert code == 6, shown
        assert shown.startswith(f"error: {place} cannot be written: ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["pi"], "'pi' is not a number"),
        (["1", "--formats", "pf16"], "did you mean fp16?"),
        (["1", "--formats", "bfloat15"], "there is no format 'bfloat15'"),
        (["1", "--formats", ","], "no format is named"),
        (["1", "--format", "fp16"], "no such option: --format; see `trimtab numerics bits --help`"),
        ([], "missing argument"),
        (["2", "--absmax", "1"], "at least 2"),
    ],
)
def test_mistakes_end_with_2(words: list[str], said: str) -> None:
    code, shown = call("numerics", "bits", *words)
    assert code == 2, shown
    assert said in shown


def test_bits_need_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from trimtab.cli.main import main\n"
        "ended = [main(['numerics', 'bits', '3.14', '--out', sys.argv[1]]), main(['numerics', 'accumulate'])]\n"
        "assert ended == [0, 8], ended"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "pip install 'trimtab[train]'" in done.stderr
    assert (tmp_path / "report.md").is_file()


def test_a_stored_float_has_its_spacings() -> None:
    row = study_bits(["1"], ["fp16"]).numbers[0].floats[0]
    assert isinstance(row, StoredFloat)
    assert row.spacings == (Fraction(1, 2048), Fraction(1, 1024))
    assert row.error == 0
    assert row.correct_digits is None
