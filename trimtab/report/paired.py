"""Paired tests for differences between two evaluations of the same items, corrected for multiple comparisons.

Shares (probe items, exact answers) are compared by McNemar's exact test: under the null hypothesis, an item whose
result changed became right or wrong with probability one half each, so the number that became right is binomial.

Losses are compared document by document. The reported loss is weighted by tokens, and so is the difference

    Δ = Σ wᵢ dᵢ / Σ wᵢ      (wᵢ tokens of document i, dᵢ its loss after − before)

with the jackknife standard error: the variation of Δ when one document is omitted. The interval uses Student's t with
the degrees of freedom of (Σ w)² / Σ w² documents of equal length, so a few long documents count as few.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.report.distributions import t_quantile, t_two_sided

ALPHA = 0.05
"""Family-wise error rate: the share of reports without any true change that claim at least one change."""
MIN_DOCUMENTS = 6
"""Minimum number of documents for a test: with five, even five differences of equal sign are not significant (2/32)."""


@dataclass(frozen=True)
class PairedItemTest:
    """Number of items that became right and wrong, and the total number of items."""

    gained: int
    lost: int
    total: int

    @property
    def p(self) -> float:
        """The p-value of the two-sided exact test, not corrected.

        Example:
            >>> PairedItemTest(2, 0, 14).p, PairedItemTest(6, 0, 14).p
            (0.5, 0.03125)
        """
        changed = self.gained + self.lost
        tail = sum(math.comb(changed, k) for k in range(min(self.gained, self.lost) + 1))
        return min(1.0, 2 * tail / 2**changed)


def compare_items(before: Sequence[bool], after: Sequence[bool]) -> PairedItemTest:
    """Compares right/wrong results of the same items.

    Example:
        >>> compare_items([True, False, False], [False, True, True])
        PairedItemTest(gained=2, lost=1, total=3)
    """
    pairs = list(zip(before, after, strict=True))
    return PairedItemTest(sum(a and not b for b, a in pairs), sum(b and not a for b, a in pairs), len(pairs))


@dataclass(frozen=True)
class PairedMeanTest:
    """The token-weighted mean difference of losses over the same documents, with its standard error."""

    difference: float
    error: float
    degrees_of_freedom: float
    num_units: int
    """Number of documents, or of pieces or groups of documents."""

    @property
    def p(self) -> float:
        """The p-value of the two-sided t-test, not corrected."""
        if self.error == 0:
            return 1.0 if self.difference == 0 else 0.0
        return t_two_sided(self.difference / self.error, self.degrees_of_freedom)

    def interval(self, alpha: float = ALPHA) -> tuple[float, float]:
        """Returns the two-sided confidence interval of the difference at level 1 − `alpha`."""
        reach = t_quantile(alpha, self.degrees_of_freedom) * self.error if self.error else 0.0
        return self.difference - reach, self.difference + reach


def compare_losses(
    before: Sequence[float], after: Sequence[float], tokens: Sequence[int]
) -> PairedMeanTest | None:
    """Compares mean losses of the same documents; returns None for fewer than `MIN_DOCUMENTS` documents.

    Example:
        >>> found = compare_losses([2.0] * 8, [1.5, 1.6, 1.4, 1.5, 1.5, 1.7, 1.3, 1.5], [100] * 8)
        >>> round(found.difference, 3), [round(end, 3) for end in found.interval()]
        (-0.5, [-0.6, -0.4])
    """
    differences = [a - b for b, a in zip(before, after, strict=True)]
    return weighted_mean(differences, tokens)


def weighted_mean(values: Sequence[float], weights: Sequence[int]) -> PairedMeanTest | None:
    """Returns the weighted mean with its jackknife standard error; None for fewer than `MIN_DOCUMENTS` values."""
    count, whole = len(values), sum(weights)
    if count < MIN_DOCUMENTS:
        return None
    mean = math.fsum(w * v for v, w in zip(values, weights, strict=True)) / whole
    # Without item i the mean is mean − wᵢ (vᵢ − mean) / (whole − wᵢ).
    moves = [w * (v - mean) / (whole - w) for v, w in zip(values, weights, strict=True)]
    middle = math.fsum(moves) / count
    error = math.sqrt((count - 1) / count * math.fsum((m - middle) ** 2 for m in moves))
    freedom = whole**2 / sum(w * w for w in weights) - 1
    # For equal values, only rounding errors remain, which are not a standard error.
    if error < 1e-12 * max(map(abs, values)):
        error = 0.0
    return PairedMeanTest(mean, error, max(freedom, 1.0), count)


def holm(p_values: Sequence[float]) -> list[float]:
    """Returns Holm's adjusted p-values; those of at most `ALPHA` are significant.

    The probability of any false positive among all comparisons is at most `ALPHA`, even if they are dependent.

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    adjusted, largest = [1.0] * len(p_values), 0.0
    for place, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - place) * p_values[i]))
        adjusted[i] = largest
    return adjusted
