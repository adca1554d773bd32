"""Numbers and verdicts of claims as text."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from trimtab.lab.studies.claims.claim import Hypothesis, Metric
from trimtab.lab.studies.claims.verdict import ClaimVerdict, Interval, mean_interval
from trimtab.report.summary import signed

MISSING = "–"
_DIGITS = {"loss": 3, "share": 1, "rate": 0}
_DIFFERENCE_DIGITS = {"loss": 4, "share": 1, "rate": 1}


def heading(metric: Metric) -> str:
    """The metric with the unit of its values.

    Example:
        >>> heading(Metric.GRAMMAR)
        'grammar, %'
    """
    return f"{metric.value}, %" if metric.scale == "share" else metric.value


def value(metric: Metric, number: float | None) -> str:
    """One value of a metric.

    Example:
        >>> value(Metric.GENERAL, 2.25), value(Metric.GENERAL, float("inf")), value(Metric.GRAMMAR, None)
        ('2.250', 'diverged', '–')
    """
    if number is None:
        return MISSING
    return f"{number:,.{_DIGITS[metric.scale]}f}" if math.isfinite(number) else "diverged"


def with_unit(metric: Metric, number: float) -> str:
    """One value of a metric in a sentence.

    Example:
        >>> with_unit(Metric.GRAMMAR, 81.37), with_unit(Metric.GENERAL, 2.25)
        ('81.4 %', '2.250')
    """
    return f"{value(metric, number)} %" if metric.scale == "share" else value(metric, number)


def mean_of_seeds(metric: Metric, numbers: Sequence[float], resolution: float = 0.0) -> str:
    """The mean over seeds with the half-width of its interval; seeds that diverged are counted.

    Example:
        >>> mean_of_seeds(Metric.GENERAL, [2.0, 2.1, 2.2]), mean_of_seeds(Metric.GENERAL, [2.0])
        ('2.100 ± 0.248', '2.000')
    """
    finite = [number for number in numbers if math.isfinite(number)]
    if len(finite) < len(numbers):
        return f"diverged ({len(numbers) - len(finite)} of {len(numbers)})"
    if not numbers:
        return MISSING
    text = value(metric, statistics.fmean(numbers))
    interval = mean_interval(numbers, resolution)
    return text if interval is None else f"{text} ± {interval.reach:,.{_DIGITS[metric.scale]}f}"


def difference(metric: Metric, interval: Interval | None, differences: Sequence[float] = ()) -> str:
    """A paired difference with its interval; without one, the mean of the differences alone.

    Example:
        >>> difference(Metric.GRAMMAR, Interval(-2.0, -3.5, -0.5, 3))
        '−2.0 (−3.5 to −0.5)'
    """
    digits = _DIFFERENCE_DIGITS[metric.scale]
    if interval is None:
        if not differences:
            return MISSING
        mean = statistics.fmean(differences)
        return _signed(mean, digits) if math.isfinite(mean) else "diverged"
    mean_text, low, high = (_signed(end, digits) for end in (interval.mean, interval.low, interval.high))
    return f"{mean_text} ({low} to {high})"


def _signed(number: float, digits: int) -> str:
    """A number with its sign, unless it is zero in the digits that are shown.

    Example:
        >>> _signed(-0.25, 2), _signed(-0.001, 2)
        ('−0.25', '0.00')
    """
    return signed(number, digits) if round(number, digits) else f"{0:.{digits}f}"


def verdict_sentence(hypothesis: Hypothesis, verdict: ClaimVerdict) -> str:
    """The hypothesis, its verdict, the reason and the interval.

    Example:
        >>> from trimtab.lab.studies.claims.claim import Direction
        >>> from trimtab.lab.studies.claims.verdict import judge
        >>> worse = Hypothesis("B forgets more.", "B", "A", Metric.GENERAL, Direction.HIGHER, 0.1)
        >>> verdict_sentence(worse, judge(worse, [0.31, 0.30, 0.29]))[:64]
        '“B forgets more.” Confirmed: the effect is larger than 0.1 nats.'
    """
    ruling = verdict.ruling.value
    text = f"“{hypothesis.text}” {ruling[0].upper()}{ruling[1:]}: {verdict.reason}."
    if verdict.interval is None:
        return text
    metric = hypothesis.metric
    return (
        f"{text} Measured: {metric.value}, {hypothesis.variant} minus {hypothesis.baseline}: "
        f"{difference(metric, verdict.interval)} {metric.unit}, 95 % interval over {verdict.interval.seeds} seeds."
    )
