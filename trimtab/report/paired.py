"""Whether two measurements of the same items differ: paired tests, corrected for how many are made at once.

Shares (probe items, exact answers) are compared by McNemar's exact test: of the items whose result changed, as many
should have become right as wrong if nothing changed, so that their number is binomial with one half.

Losses are compared document by document. The reported loss is weighted by tokens, and so is the difference

    Δ = Σ wᵢ dᵢ / Σ wᵢ      (wᵢ tokens of document i, dᵢ its loss after − before)

whose standard error is the jackknife's: how far Δ moves when one document is left out. Its interval is Student's, with
the degrees of freedom of (Σ w)² / Σ w² documents of equal length: a few long documents count as few.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.report.distributions import t_quantile, t_two_sided

ALPHA = 0.05
"""The share of reports without any true change in which at least one change may be claimed."""
FEWEST = 6
"""Documents below which no loss is tested: with five, not even five differences of one sign are significant (2/32)."""


@dataclass(frozen=True)
class Flips:
    """Items whose result changed: how many became right, how many wrong, of how many."""

    gained: int
    lost: int
    total: int

    @property
    def p(self) -> float:
        """Of the two-sided exact test, not corrected.

        Example:
            >>> Flips(2, 0, 14).p, Flips(6, 0, 14).p
            (0.5, 0.03125)
        """
        changed = self.gained + self.lost
        tail = sum(math.comb(changed, k) for k in range(min(self.gained, self.lost) + 1))
        return min(1.0, 2 * tail / 2**changed)


def flips(before: Sequence[bool], after: Sequence[bool]) -> Flips:
    """Compares right/wrong results of the same items.

    Example:
        >>> flips([True, False, False], [False, True, True])
        Flips(gained=2, lost=1, total=3)
    """
    pairs = list(zip(before, after, strict=True))
    return Flips(sum(a and not b for b, a in pairs), sum(b and not a for b, a in pairs), len(pairs))


@dataclass(frozen=True)
class Shift:
    """The token-weighted difference of losses over the same documents, with its standard error."""

    difference: float
    error: float
    freedom: float
    units: int

    @property
    def p(self) -> float:
        """Of the two-sided t-test, not corrected."""
        if self.error == 0:
            return 1.0 if self.difference == 0 else 0.0
        return t_two_sided(self.difference / self.error, self.freedom)

    def interval(self, alpha: float = ALPHA) -> tuple[float, float]:
        """The two-sided interval that misses the true difference with probability `alpha`."""
        reach = t_quantile(alpha, self.freedom) * self.error if self.error else 0.0
        return self.difference - reach, self.difference + reach


def shift(before: Sequence[float], after: Sequence[float], tokens: Sequence[int]) -> Shift | None:
    """Compares mean losses of the same documents; None where there are fewer than `FEWEST`.

    Example:
        >>> found = shift([2.0] * 8, [1.5, 1.6, 1.4, 1.5, 1.5, 1.7, 1.3, 1.5], [100] * 8)
        >>> round(found.difference, 3), [round(end, 3) for end in found.interval()]
        (-0.5, [-0.6, -0.4])
    """
    differences = [a - b for b, a in zip(before, after, strict=True)]
    return weighted_mean(differences, tokens)


def weighted_mean(values: Sequence[float], weights: Sequence[int]) -> Shift | None:
    """The weighted mean with its jackknife error; None for fewer than `FEWEST` values."""
    count, whole = len(values), sum(weights)
    if count < FEWEST:
        return None
    mean = math.fsum(w * v for v, w in zip(values, weights, strict=True)) / whole
    # Without item i the mean is mean − wᵢ (vᵢ − mean) / (whole − wᵢ).
    moves = [w * (v - mean) / (whole - w) for v, w in zip(values, weights, strict=True)]
    middle = math.fsum(moves) / count
    error = math.sqrt((count - 1) / count * math.fsum((m - middle) ** 2 for m in moves))
    freedom = whole**2 / sum(w * w for w in weights) - 1
    # Equal values leave rounding in the last digits, which is no error to test against.
    if error < 1e-12 * max(map(abs, values)):
        error = 0.0
    return Shift(mean, error, max(freedom, 1.0), count)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values: those at most `ALPHA` are significant with all the others considered.

    The chance of any false claim among all comparisons stays within `ALPHA`, however they depend on each other.

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    adjusted, largest = [1.0] * len(p_values), 0.0
    for place, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - place) * p_values[i]))
        adjusted[i] = largest
    return adjusted
