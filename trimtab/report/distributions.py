"""Probabilities of the beta, Student's t and binomial distributions in plain Python.

The report does not depend on scipy. Everything follows from the regularized incomplete beta function

    I_x(a, b) = ∫₀ˣ t^(a−1) (1−t)^(b−1) dt / B(a, b)

which is evaluated by its continued fraction (DLMF 8.17.22) with the modified Lentz method.
"""

from __future__ import annotations

import math
from collections.abc import Callable

TINY = 1e-300
PRECISION = 1e-15
MAX_TERMS = 100_000


def incomplete_beta(x: float, a: float, b: float) -> float:
    """I_x(a, b) for 0 ≤ x ≤ 1 and positive a, b.

    Example:
        >>> round(incomplete_beta(0.3, 2, 1), 12)  # x²
        0.09
    """
    assert 0 <= x <= 1, x
    assert min(a, b) > 0, (a, b)
    if x in (0.0, 1.0):
        return x
    # The fraction converges quickly below the mean; above it the complement is used.
    if x > (a + 1) / (a + b + 2):
        return 1 - incomplete_beta(1 - x, b, a)
    log_front = (
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    ) - math.log(a)
    return math.exp(log_front) * _fraction(x, a, b)


def _fraction(x: float, a: float, b: float) -> float:
    c, d = 1.0, 1 / _away(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, MAX_TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / _away(1 + term * d)
            c = _away(1 + term / c)
            value *= c * d
        if abs(c * d - 1) < PRECISION:
            break
    return value


def _away(value: float) -> float:
    """Replaces a value close to zero by TINY, to avoid division by zero."""
    return value if abs(value) > TINY else TINY


def t_two_sided(t: float, freedom: float) -> float:
    """P(|T| ≥ |t|) for Student's t with `freedom` degrees of freedom, possibly fractional.

    Example:
        >>> round(t_two_sided(1.0, 1), 12)  # Cauchy: half of the mass is outside ±1
        0.5
    """
    if math.isinf(t):
        return 0.0
    return incomplete_beta(freedom / (freedom + t * t), freedom / 2, 0.5)


def t_quantile(two_sided: float, freedom: float) -> float:
    """Returns the t with P(|T| ≥ t) = `two_sided`.

    Example:
        >>> round(t_quantile(0.05, 10), 4)
        2.2281
    """
    assert 0 < two_sided < 1, two_sided
    high = 1.0
    while t_two_sided(high, freedom) > two_sided:
        high *= 2
    return _bisect(lambda t: t_two_sided(t, freedom) - two_sided, 0.0, high)


def exact_share_interval(right: int, total: int, level: float = 0.95) -> tuple[float, float]:
    """The Clopper–Pearson interval of a proportion: at least `level` of such intervals contain the true value.

    Example:
        >>> [round(end, 4) for end in exact_share_interval(0, 10)]  # 1 − 0.025^(1/10)
        [0.0, 0.3085]
    """
    assert 0 <= right <= total > 0, (right, total)
    tail = (1 - level) / 2
    low = _bisect(lambda p: tail - incomplete_beta(p, right, total - right + 1), 0, 1) if right else 0.0
    high = (
        _bisect(lambda p: 1 - incomplete_beta(p, right + 1, total - right) - tail, 0, 1)
        if right < total
        else 1.0
    )
    return low, high


def _bisect(falling: Callable[[float], float], low: float, high: float) -> float:
    """Finds the root of a decreasing function by bisection."""
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return (low + high) / 2
