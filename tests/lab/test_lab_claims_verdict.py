"""Verdicts from made-up differences: every ruling, every direction, and cases without a verdict."""

from __future__ import annotations

import math

import pytest

from trimtab.lab.studies.claims.claim import Direction, Hypothesis, Metric
from trimtab.lab.studies.claims.verdict import Ruling, judge, mean_interval

CONFIRMED, REFUTED, OPEN = Ruling.CONFIRMED, Ruling.REFUTED, Ruling.NOT_DETECTABLE


def hypothesis(direction: Direction, smallest: float = 0.1, metric: Metric = Metric.GENERAL) -> Hypothesis:
    return Hypothesis("It is so.", "one", "other", metric, direction, smallest)


HIGHER, LOWER, EQUAL = map(hypothesis, Direction)


def test_an_interval_is_students() -> None:
    found = mean_interval([1.0, 2.0, 3.0])
    assert found is not None
    assert found.seeds == 3
    # t of 2 degrees of freedom is 4.302653; s is 1
    assert found.mean == pytest.approx(2.0)
    assert found.reach == pytest.approx(4.302653 / math.sqrt(3), abs=1e-5)
    wider = mean_interval([1.0, 2.0, 3.0], level=0.99)
    assert wider is not None
    assert wider.reach == pytest.approx(9.924843 / math.sqrt(3), abs=1e-5)


def test_more_seeds_make_it_narrower() -> None:
    three, six = mean_interval([0.9, 1.0, 1.1]), mean_interval([0.9, 1.0, 1.1] * 2)
    assert three is not None
    assert six is not None
    assert six.reach < three.reach / 2


@pytest.mark.parametrize(
    ("asked", "differences", "expected", "reason"),
    [
        # a clear effect
        (HIGHER, [0.31, 0.30, 0.29], CONFIRMED, "larger than 0.1 nats"),
        (LOWER, [-0.31, -0.30, -0.29], CONFIRMED, "larger than 0.1 nats"),
        (EQUAL, [0.31, 0.30, 0.29], REFUTED, "larger than 0.1 nats"),
        (EQUAL, [-0.31, -0.30, -0.29], REFUTED, "larger than 0.1 nats"),
        # none, and a tight interval
        (HIGHER, [0.001, -0.001, 0.0], REFUTED, "no effect as large as 0.1 nats"),
        (LOWER, [0.001, -0.001, 0.0], REFUTED, "no effect as large as 0.1 nats"),
        (EQUAL, [0.001, -0.001, 0.0], CONFIRMED, "no difference larger than 0.1 nats"),
        # none, and a wide one
        (HIGHER, [0.2, -0.2, 0.0], OPEN, "neither shown nor excluded"),
        (LOWER, [0.2, -0.2, 0.0], OPEN, "neither shown nor excluded"),
        (EQUAL, [0.2, -0.2, 0.0], OPEN, "neither shown nor excluded"),
        # the opposite
        (HIGHER, [-0.31, -0.30, -0.29], REFUTED, "opposite"),
        (LOWER, [0.31, 0.30, 0.29], REFUTED, "opposite"),
        # an effect that is there, and perhaps too small to matter
        (HIGHER, [0.09, 0.10, 0.11], OPEN, "whether it exceeds 0.1 nats is open"),
        (LOWER, [-0.09, -0.10, -0.11], OPEN, "whether it exceeds 0.1 nats is open"),
        # an effect that is there and too small
        (HIGHER, [0.049, 0.050, 0.051], REFUTED, "no effect as large as 0.1 nats"),
        # too few seeds, however clear
        (HIGHER, [5.0], OPEN, "1 seed; an interval needs 3"),
        (EQUAL, [0.0, 0.0], OPEN, "2 seeds; an interval needs 3"),
        (HIGHER, [], OPEN, "no seed has both runs"),
    ],
)
def test_the_ruling_follows_from_the_interval(
    asked: Hypothesis, differences: list[float], expected: Ruling, reason: str
) -> None:
    found = judge(asked, differences)
    assert found.ruling is expected
    assert reason in found.reason
    assert (found.interval is None) == (len(differences) < 3)


def test_variants_that_hardly_differ_give_no_verdict() -> None:
    for differences in ([0.31, 0.30, 0.29], [0.0, 0.0, 0.0]):
        found = judge(HIGHER, differences, too_weak="decay shrinks nothing")
        assert found.ruling is OPEN
        assert found.reason == "decay shrinks nothing"
        assert found.interval is not None  # it is shown all the same


def test_a_share_is_known_to_half_an_item_at_best() -> None:
    """Three seeds with the same number of correct answers have no spread, but their mean is not exact."""
    points = hypothesis(Direction.LOWER, 2.0, Metric.GRAMMAR)
    assert judge(points, [0.0, 0.0, 0.0], resolution=1.0).ruling is REFUTED
    found = judge(points, [0.0, 0.0, 0.0], resolution=100 / 12)  # 12 items: one is 8 points
    assert found.ruling is OPEN
    assert found.interval is not None
    assert found.interval.low == pytest.approx(-100 / 24)
    confirmed = judge(points, [-5.0, -5.0, -5.0], resolution=1.0)
    assert confirmed.ruling is CONFIRMED


@pytest.mark.parametrize(
    ("asked", "differences", "expected", "named"),
    [
        (HIGHER, [math.inf] * 3, CONFIRMED, "one diverged"),
        (LOWER, [math.inf] * 3, REFUTED, "one diverged"),
        (EQUAL, [math.inf] * 3, REFUTED, "one diverged"),
        (HIGHER, [-math.inf] * 3, REFUTED, "other diverged"),
        (hypothesis(Direction.LOWER, 2.0, Metric.GRAMMAR), [-math.inf] * 3, CONFIRMED, "one diverged"),
        (HIGHER, [math.inf] * 2, OPEN, "2 seeds"),
        (HIGHER, [math.inf, 0.3, 0.3], OPEN, "some seeds"),
        (HIGHER, [math.inf, -math.inf, 0.3], OPEN, "some seeds"),
    ],
)
def test_a_variant_that_diverges(
    asked: Hypothesis, differences: list[float], expected: Ruling, named: str
) -> None:
    found = judge(asked, differences)
    assert found.ruling is expected
    assert named in found.reason
    assert found.interval is None


def test_invalid_declarations_are_rejected() -> None:
    with pytest.raises(AssertionError, match="above zero"):
        hypothesis(Direction.HIGHER, 0.0)
    with pytest.raises(AssertionError):
        Hypothesis("x", "same", "same", Metric.GENERAL, Direction.HIGHER, 0.1)
