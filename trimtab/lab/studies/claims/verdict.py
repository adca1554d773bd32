"""The interval of a paired difference, and the verdict on a hypothesis that follows from it.

Runs of two variants with the same seed see the same data in the same order; their difference is one observation, and
most of the variation between seeds cancels in it. For n differences with mean d and standard deviation s the interval
is Student's, d ± t(n − 1) · s / √n. It covers the true mean difference in 95 % of studies if differences are roughly
normal. With two degrees of freedom t is 4.3, so three seeds give a wide interval, and fewer give none.

The interval is compared with the smallest effect of interest δ:

    hypothesis   confirmed                   refuted                       not detectable
    higher       all of it above +δ          all of it below +δ            otherwise
    lower        all of it below −δ          all of it above −δ            otherwise
    equal        all of it within ±δ         all of it beyond +δ or −δ     otherwise

A share of n items moves in steps of 1/n; seeds that happen to agree would give an interval of no width. Its half-width
is therefore at least half such a step.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.lab.studies.claims.claim import Direction, Hypothesis
from trimtab.report.distributions import t_quantile

LEVEL = 0.95
FEWEST_SEEDS = 3


class Ruling(enum.Enum):
    """The outcome of testing a hypothesis."""

    CONFIRMED = "confirmed"
    REFUTED = "refuted"
    NOT_DETECTABLE = "not detectable"
    """The study can neither show the effect nor exclude one of interest."""


@dataclass(frozen=True)
class Interval:
    """A mean with its confidence interval; infinite where a run diverged."""

    mean: float
    low: float
    high: float
    seeds: int

    @property
    def reach(self) -> float:
        """Half of its width."""
        return (self.high - self.low) / 2


@dataclass(frozen=True)
class ClaimVerdict:
    """A ruling, the interval that it rests on (None where there is none) and the reason in a few words."""

    ruling: Ruling
    interval: Interval | None
    reason: str


def mean_interval(values: Sequence[float], resolution: float = 0.0, level: float = LEVEL) -> Interval | None:
    """Student's interval of the mean; None for fewer than three values, or where one is not finite.

    Args:
        values: one per seed.
        resolution: the step in which the quantity moves; 0 for a continuous one.
        level: the confidence level.

    Example:
        >>> found = mean_interval([1.0, 2.0, 3.0])
        >>> found.mean, round(found.reach, 3)
        (2.0, 2.484)
    """
    if len(values) < FEWEST_SEEDS or not all(map(math.isfinite, values)):
        return None
    mean = statistics.fmean(values)
    error = statistics.stdev(values) / math.sqrt(len(values))
    reach = t_quantile(1 - level, len(values) - 1) * error if error else 0.0
    reach = max(reach, resolution / 2)
    return Interval(mean, mean - reach, mean + reach, len(values))


def judge(
    hypothesis: Hypothesis, differences: Sequence[float], *, resolution: float = 0.0, too_weak: str = ""
) -> ClaimVerdict:
    """The verdict on a hypothesis.

    Args:
        hypothesis: the hypothesis to judge.
        differences: variant − baseline of each seed, in the metric's unit; ±inf where one of the two diverged.
        resolution: the step in which the metric moves.
        too_weak: why the variants differ too little for any effect to show; empty where they do not.

    Example:
        >>> from trimtab.lab.studies.claims.claim import Metric
        >>> worse = Hypothesis("It is worse.", "a", "b", Metric.GENERAL, Direction.HIGHER, 0.1)
        >>> judge(worse, [0.31, 0.30, 0.29]).ruling
        <Ruling.CONFIRMED: 'confirmed'>
    """
    seeds = len(differences)
    if seeds and all(map(math.isinf, differences)) and len(set(differences)) == 1:
        return _diverged(hypothesis, differences[0], seeds)
    interval = mean_interval(differences, resolution)
    if interval is None:
        if seeds < FEWEST_SEEDS:
            return ClaimVerdict(
                Ruling.NOT_DETECTABLE, None, f"{_counted(seeds)}; an interval needs {FEWEST_SEEDS}"
            )
        return ClaimVerdict(
            Ruling.NOT_DETECTABLE, None, "training diverged with some seeds and not with others"
        )
    if too_weak:
        return ClaimVerdict(Ruling.NOT_DETECTABLE, interval, too_weak)
    return ClaimVerdict(*_ruling(hypothesis, interval))


def _ruling(hypothesis: Hypothesis, interval: Interval) -> tuple[Ruling, Interval, str]:
    delta = f"{hypothesis.smallest:g} {hypothesis.metric.unit}"
    smallest, low, high = hypothesis.smallest, interval.low, interval.high
    if hypothesis.direction is Direction.EQUAL:
        if -smallest < low and high < smallest:
            return Ruling.CONFIRMED, interval, f"no difference larger than {delta}"
        if low > smallest or high < -smallest:
            return Ruling.REFUTED, interval, f"the difference is larger than {delta}"
        return Ruling.NOT_DETECTABLE, interval, f"a difference of {delta} is neither shown nor excluded"
    if hypothesis.direction is Direction.LOWER:
        low, high = -high, -low
    if low > smallest:
        return Ruling.CONFIRMED, interval, f"the effect is larger than {delta}"
    if high < 0:
        return Ruling.REFUTED, interval, "the effect is the opposite"
    if high < smallest:
        return Ruling.REFUTED, interval, f"there is no effect as large as {delta}"
    if low > 0:
        return Ruling.NOT_DETECTABLE, interval, f"there is an effect; whether it exceeds {delta} is open"
    return Ruling.NOT_DETECTABLE, interval, f"an effect of {delta} is neither shown nor excluded"


def _diverged(hypothesis: Hypothesis, difference: float, seeds: int) -> ClaimVerdict:
    """All seeds of exactly one of the two variants diverged."""
    worse = (
        hypothesis.variant if (difference > 0) == (hypothesis.metric.scale == "loss") else hypothesis.baseline
    )
    reason = f"training with {worse} diverged with all seeds"
    expected = {Direction.HIGHER: difference > 0, Direction.LOWER: difference < 0, Direction.EQUAL: False}
    if seeds < FEWEST_SEEDS:
        return ClaimVerdict(
            Ruling.NOT_DETECTABLE, None, f"{reason}, {_counted(seeds)}; a verdict needs {FEWEST_SEEDS}"
        )
    return ClaimVerdict(Ruling.CONFIRMED if expected[hypothesis.direction] else Ruling.REFUTED, None, reason)


def _counted(seeds: int) -> str:
    return "no seed has both runs" if not seeds else f"{seeds} seed{'s' if seeds > 1 else ''}"
