"""The paired tests: known values, and the rate of reports with false positives."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.report.distributions import exact_share_interval, incomplete_beta, t_quantile, t_two_sided
from trimtab.report.paired import (
    ALPHA,
    MIN_DOCUMENTS,
    PairedItemTest,
    compare_items,
    compare_losses,
    holm,
    weighted_mean,
)
from trimtab.report.rundata import RunData
from trimtab.report.verdicts import MeasuredChange, changes, verdict


@pytest.mark.parametrize(
    ("gained", "lost", "p"),
    [
        (0, 0, 1.0),
        (1, 0, 1.0),
        (2, 0, 0.5),
        (5, 0, 0.0625),
        (6, 0, 0.03125),
        (5, 1, 0.21875),
        (10, 0, 2 / 1024),
    ],
)
def test_exact_test_of_changed_items(gained: int, lost: int, p: float) -> None:
    assert PairedItemTest(gained, lost, 14).p == p
    assert PairedItemTest(lost, gained, 14).p == p


def test_items_are_compared_one_by_one() -> None:
    assert compare_items([True, True, False, False], [True, False, True, True]) == PairedItemTest(2, 1, 4)
    with pytest.raises(ValueError, match="zip"):
        compare_items([True], [True, False])


@given(st.integers(1, 60), st.integers(0, 60), st.floats(0.01, 0.99))
def test_the_incomplete_beta_function_is_a_binomial_tail(n: int, k: int, p: float) -> None:
    k = max(1, min(k, n))
    tail = math.fsum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k, n + 1))
    assert incomplete_beta(p, k, n - k + 1) == pytest.approx(tail, rel=1e-10, abs=1e-14)


@pytest.mark.parametrize(
    ("two_sided", "freedom", "quantile"),
    # 1 degree of freedom is Cauchy, 2 have a closed form, the others are in every table
    [
        (0.05, 1, math.tan(math.pi * 0.475)),
        (0.05, 2, 0.95 * math.sqrt(2 / (1 - 0.95**2))),
        (0.05, 10, 2.228138852),
        (0.01, 30, 2.749995654),
        (0.05, 1e7, 1.959964),
    ],
)
def test_quantiles_of_student_s_t(two_sided: float, freedom: float, quantile: float) -> None:
    assert t_quantile(two_sided, freedom) == pytest.approx(quantile, rel=1e-6)
    assert t_two_sided(-quantile, freedom) == pytest.approx(two_sided, rel=1e-5)


def test_results_equal_scipy() -> None:
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    for t, freedom in ((0.3, 2.5), (2.1, 17.3), (9.0, 400.0)):
        assert t_two_sided(t, freedom) == pytest.approx(2 * stats.t.sf(t, freedom), rel=1e-9)
    assert PairedItemTest(9, 2, 20).p == pytest.approx(stats.binomtest(2, 11).pvalue, rel=1e-12)


def test_the_interval_of_a_share() -> None:
    assert exact_share_interval(0, 14) == (0.0, pytest.approx(1 - 0.025 ** (1 / 14)))
    assert exact_share_interval(14, 14) == (pytest.approx(0.025 ** (1 / 14)), 1.0)
    low, high = exact_share_interval(7, 14)
    assert low == pytest.approx(1 - high)
    assert low == pytest.approx(0.2304, abs=1e-4)


def test_holm_s_correction() -> None:
    assert holm([]) == []
    assert holm([0.02]) == [0.02]
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]


def test_documents_of_equal_length_have_the_textbook_interval() -> None:
    before, after = [3.0, 2.5, 2.0, 4.0, 3.5, 3.1], [2.8, 2.6, 1.7, 3.5, 3.4, 2.8]
    found = compare_losses(before, after, [50] * 6)
    assert found is not None
    differences = [a - b for a, b in zip(after, before, strict=True)]
    mean = sum(differences) / 6
    error = math.sqrt(sum((d - mean) ** 2 for d in differences) / 5 / 6)
    assert (found.difference, found.error, found.degrees_of_freedom) == pytest.approx((mean, error, 5))
    assert found.interval()[1] == pytest.approx(
        mean + 2.570582 * error, abs=1e-6
    )  # t for 5 degrees of freedom


def test_long_documents_weigh_more_and_a_few_of_them_count_as_few() -> None:
    found = weighted_mean([1.0] + [0.0] * 9, [910] + [10] * 9)
    assert found is not None
    assert found.difference == pytest.approx(0.91)
    assert found.degrees_of_freedom == 1.0  # equivalent to one document: not significant
    assert found.p > ALPHA


def test_too_few_documents_are_not_tested() -> None:
    assert (
        compare_losses([1.0] * (MIN_DOCUMENTS - 1), [0.5] * (MIN_DOCUMENTS - 1), [10] * (MIN_DOCUMENTS - 1))
        is None
    )


def test_documents_that_all_change_alike() -> None:
    same, moved = compare_losses([1.1] * 6, [1.1] * 6, [7] * 6), compare_losses([1.1] * 6, [1.4] * 6, [7] * 6)
    assert same is not None
    assert moved is not None
    assert (same.p, same.interval()) == (1.0, (0.0, 0.0))
    assert moved.p == 0.0


KINDS = {
    "arithmetic": 40,
    "order": 24,
    "place": 20,
    "agreement": 18,
    "plural": 16,
    "determiner": 14,
    "pronoun": 14,
}
KINDS |= {"verb form": 14, "word order": 14, "common sense": 14, "transitivity": 12, "days": 20}


def simulated(rng: random.Random, *, loss: float = 0.0, gain: float = 0.0) -> RunData:
    """Two evaluations of a model with this gain: results of items and losses of documents also change randomly."""

    def results(items: int) -> tuple[str, str]:
        before, after = "", ""
        share, flipped = rng.uniform(0.3, 0.95), rng.uniform(0.05, 0.4)
        for _ in range(items):
            first = rng.random() < share
            second = first
            # Without a gain, a changed item is equally likely to become right or wrong.
            if rng.random() < flipped:
                first = rng.random() < 0.5
                second = not first
            if rng.random() < gain:
                second = True
            before, after = before + str(int(first)), after + str(int(second))
        return before, after

    probe = {kind: results(items) for kind, items in KINDS.items()}
    answers = results(60)
    records: dict[str, list[dict[str, Any]]] = {"eval": [], "probe": [], "answers": []}
    for name, documents in (("domain", 120), ("general", 30)):
        tokens = [max(8, int(rng.lognormvariate(5, 0.8))) for _ in range(documents)]
        first = [rng.gauss(3, 0.5) for _ in range(documents)]
        moves = [loss + rng.gauss(0, 0.05) * rng.choice((0.3, 0.3, 2.0)) for _ in range(documents)]
        for step, losses in ((0, first), (9, [a + b for a, b in zip(first, moves, strict=True)])):
            mean = sum(v * w for v, w in zip(losses, tokens, strict=True)) / sum(tokens)
            units = {"unit": "document", "losses": losses, "tokens": tokens}
            records["eval"].append({"step": step, "name": name, "loss": mean, "units": units})
    for i, step in enumerate((0, 9)):
        right = {kind: pair[i] for kind, pair in probe.items()}
        scores = {kind: digits.count("1") / len(digits) for kind, digits in right.items()}
        records["probe"].append({"step": step, "scores": scores, "items": KINDS, "right": right})
        records["answers"].append(
            {"step": step, "exact": answers[i].count("1"), "total": 60, "right": answers[i]}
        )
    return RunData(Path("run"), {}, {}, {}, "", records)


def test_reports_of_runs_that_changed_nothing_rarely_claim_a_change() -> None:
    rng = random.Random(20)
    reports = [verdict(changes(simulated(rng))) for _ in range(600)]
    claimed = sum(bool(report.gained or report.lost) for report in reports)
    assert claimed / len(reports) <= ALPHA
    # The tests still have power: without the correction many reports would claim a change.
    rows = [row for report in reports[:100] for row in report.unchanged]
    assert sum(row.test.p <= ALPHA for row in rows if row.test) > len(reports[:100]) / 10


def test_a_real_change_is_detected() -> None:
    rng = random.Random(21)
    reports = [verdict(changes(simulated(rng, loss=-0.05, gain=0.5))) for _ in range(40)]
    for name in ("domain loss", "probe: all"):
        found = sum(name in [row.name for row in report.gained] for report in reports)
        assert found >= 38, name
    assert not any(report.lost for report in reports)


def test_two_more_choices_of_fourteen_are_no_change() -> None:
    row = MeasuredChange(
        "x",
        12 / 14,
        1.0,
        "share",
        items=14,
        test=PairedItemTest(2, 0, 14),
        adjusted=PairedItemTest(2, 0, 14).p,
    )
    assert (row.outcome, row.label) == ("unchanged", "no measurable change")
    assert row.evidence() == "+2 −0, p = 0.5"
