"""Formatting of numbers."""

from __future__ import annotations

import pytest

from trimtab.facts.units import format_rate


@pytest.mark.parametrize(
    ("rate", "printed"),
    [
        (0.0043, "0.0043"),
        (0.4321, "0.43"),
        (1.0, "1"),
        (4.36, "4.4"),
        (9.94, "9.9"),
        (9.96, "10"),
        (950.4, "950"),
        (12_340.0, "12 K"),
    ],
)
def test_a_slow_rate_is_not_printed_as_zero(rate: float, printed: str) -> None:
    assert format_rate(rate) == printed
