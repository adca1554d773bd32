"""Sums with different dtypes: torch's results equal exact arithmetic, rounded where torch rounds."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from command import call

from trimtab.facts.dtypes import TORCH_NAMES
from trimtab.facts.errors import RecipeError
from trimtab.lab.numerics.accumulate import AccumulateStudy, Method, SumRow, study_accumulation
from trimtab.lab.numerics.accumulate_report import accumulation_document
from trimtab.lab.numerics.formats import FORMATS
from trimtab.report.document import LineChart, Table, Text


@pytest.fixture(scope="module")
def thousand() -> AccumulateStudy:
    return study_accumulation()


def find(study: AccumulateStudy, total: str, addend: str, method: Method = Method.PLAIN) -> SumRow:
    return next(r for r in study.rows if (r.sum_format, r.addend_format, r.method) == (total, addend, method))


def test_the_four_classic_cases(thousand: AccumulateStudy) -> None:
    """As the well-known exercise prints them: 10.0001, 9.9531, 10.0021, 10.0021."""
    assert find(thousand, "fp32", "fp32").result == pytest.approx(10.000133514, abs=1e-8)
    assert find(thousand, "fp16", "fp16").result == 9.953125
    mixed, cast = find(thousand, "fp32", "fp16"), find(thousand, "fp32", "fp16", Method.CAST)
    assert mixed.result == cast.result == 10.00213623046875
    assert mixed.exact == 10
    assert mixed.adding_error == 0
    assert mixed.addend_error == pytest.approx(mixed.error)


@pytest.mark.parametrize("value", ["0.01", "-0.3", "1e-7", "3"])
def test_every_mixture_is_rounded_where_torch_rounds(value: str) -> None:
    """Torch adds in the wider of both dtypes, fp32 for two different 16-bit dtypes, and rounds to the sum's."""
    count = 400
    study = study_accumulation(value, count)
    for row in study.rows:
        if row.method is not Method.PLAIN:
            continue
        names = {getattr(torch, long): short for short, long in TORCH_NAMES.items()}
        types = [getattr(torch, TORCH_NAMES[name]) for name in (row.sum_format, row.addend_format)]
        wide = names[torch.promote_types(*types)]
        addend = FORMATS[row.addend_format].round(Fraction(value)).value
        total, stuck = Fraction(0), None
        for step in range(1, count + 1):
            added = FORMATS[wide].round(total + addend).value
            new = FORMATS[row.sum_format].round(added).value
            stuck = stuck or (step if new == total else None)
            total = new
        assert row.result == total, (row.sum_format, row.addend_format)
        assert row.stagnation is not None
        assert row.stagnation.step == stuck, (row.sum_format, row.addend_format)
        if stuck:
            assert row.stagnation.total == total
            assert abs(addend) <= row.stagnation.spacing / 2


def test_a_bf16_sum_stops_growing(thousand: AccumulateStudy) -> None:
    row = find(thousand, "bf16", "bf16")
    assert row.result == 4
    assert row.stagnation is not None
    assert (row.stagnation.total, row.stagnation.spacing, row.stagnation.step) == (4, Fraction(1, 32), 351)
    assert row.curve[-1] == (1000, 4.0)
    far = find(thousand, "fp16", "fp16").stagnation
    assert far is not None
    assert (far.total, far.step) == (32, None)
    later = find(study_accumulation("0.01", 2850), "fp16", "fp16")
    assert later.result == 32, "and there it stands still indeed"
    assert later.stagnation is not None
    assert later.stagnation.step is not None


def test_better_sums_are_better(thousand: AccumulateStudy) -> None:
    for name in ("fp16", "bf16"):
        plain, kahan = find(thousand, name, name), find(thousand, name, name, Method.KAHAN)
        assert abs(kahan.error) < abs(plain.error) / 10
    stochastic = find(thousand, "bf16", "fp32", Method.STOCHASTIC)
    assert stochastic.spread is not None
    low, high = stochastic.spread
    assert low < stochastic.result < high, "seeds differ"
    assert abs(stochastic.error) < 0.3, "right on average"
    assert study_accumulation().rows[-1].result == stochastic.result, "the same every time"


def test_addends_that_are_lost_or_too_large() -> None:
    small = study_accumulation("1e-9", 20)
    lost = find(small, "fp32", "fp16")
    assert (lost.result, lost.relative_error) == (0.0, 1.0)
    assert lost.stagnation is not None
    assert (lost.stagnation.total, lost.stagnation.step) == (0, 1)
    large = study_accumulation("-1e30", 20)
    beyond = find(large, "fp16", "fp32")
    assert (beyond.result, beyond.error, beyond.stagnation) == (-math.inf, -math.inf, None)
    assert find(large, "fp32", "fp16").addend_error is None
    for study in (small, large):
        tables = [b for s in accumulation_document(study).sections for b in s.blocks if isinstance(b, Table)]
        assert all(len(row) == len(table.head) for table in tables for row in table.rows)


def test_the_report_draws_the_running_sums(thousand: AccumulateStudy) -> None:
    document = accumulation_document(thousand, ("a CPU",))
    chart = next(b for s in document.sections for b in s.blocks if isinstance(b, LineChart))
    ends = {series.name: series.points[-1] for series in chart.series}
    assert ends["exact"] == (1000.0, 10.0)
    assert ends["bf16 += bf16"] == (1000.0, 4.0)
    texts = " ".join(b.text for s in document.sections for b in s.blocks if isinstance(b, Text))
    assert "Casting the addend first changes nothing" in texts
    assert "That happened here to bf16 += fp32, bf16 += fp16, bf16 += bf16." in texts


def test_bad_input() -> None:
    for count in (0, -3, 100_001):
        with pytest.raises(RecipeError, match="use 1 to 100000"):
            study_accumulation(count=count)
    for value in ("0", "nan", "-inf", "1e301", "1e-301"):
        with pytest.raises(RecipeError, match="use a magnitude between"):
            study_accumulation(value)
    with pytest.raises(RecipeError, match="is not a number"):
        study_accumulation("a lot")


def test_the_command_line(tmp_path: Path) -> None:
    code, shown = call(
        "numerics", "accumulate", "--count", 3, "--value", "-1e30", "--json", "--out", tmp_path
    )
    assert code == 0, shown
    text = shown[: shown.rindex("}") + 1]
    records = json.loads(text, parse_constant=pytest.fail)["records"]
    assert {record["result"] for record in records} >= {"-inf"}
    lines = (tmp_path / "records.jsonl").read_text().splitlines()
    assert len(lines) == len(records)
    assert (tmp_path / "report.md").is_file()
    code, shown = call("numerics", "accumulate", "--count", 0)
    assert (code, shown) == (2, "error: --count 0 is out of range; use 1 to 100000\n")
