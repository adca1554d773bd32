"""One number added many times: how the dtypes of addend and accumulator affect the result.

Torch computes the sums, `total += addend` on 0-dimensional tensors. It adds in the wider of both dtypes and rounds the
result to the accumulator's dtype.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch

from trimtab.facts.dtypes import TORCH_NAMES
from trimtab.facts.errors import RecipeError
from trimtab.kernels.stochastic_rounding import stochastic_round_
from trimtab.lab.numerics.formats import FORMATS
from trimtab.lab.numerics.number_text import parse_number

MOST = 100_000
"""Maximum number of additions, which take seconds."""
SMALLEST, LARGEST = Fraction("1e-300"), Fraction("1e300")
"""Range of magnitudes whose sums and errors fp64 can represent."""
CURVE_POINTS = 200
SEEDS = 32
"""Number of sums with stochastic rounding, each with other random bits."""
ADDENDS = ("fp32", "fp16", "bf16")
SUMS = ("fp64", "fp32", "fp16", "bf16")


class Method(enum.Enum):
    """The method of summation."""

    PLAIN = "total += addend"
    CAST = "total += addend cast to the sum's format"
    KAHAN = "Kahan's compensated sum"
    STOCHASTIC = "total rounded stochastically"


@dataclass(frozen=True)
class Stagnation:
    """Where a sum stops growing: the addend is at most half of the spacing there."""

    total: Fraction
    spacing: Fraction
    """Spacing of the sum's dtype at that total."""
    step: int | None
    """The first addition that did not change the sum; None if there were fewer."""


@dataclass(frozen=True)
class SumRow:
    """The sum of one method with one combination of dtypes."""

    method: Method
    sum_format: str
    addend_format: str
    result: float
    exact: Fraction
    """count × value."""
    rounded_exact: Fraction | None
    """count × the addend rounded to its dtype; None if that is not finite."""
    stagnation: Stagnation | None
    curve: tuple[tuple[int, float], ...]
    """(additions, total), at most about `CURVE_POINTS` of them."""
    spread: tuple[float, float] | None = None
    """Smallest and largest result over the seeds of stochastic rounding; `result` is then their mean."""

    @property
    def error(self) -> float:
        """Result minus the exact sum."""
        return _difference(self.result, self.exact)

    @property
    def relative_error(self) -> float:
        """|error| / |exact sum|."""
        return abs(self.error / float(self.exact))

    @property
    def addend_error(self) -> float | None:
        """The error from rounding the addend once, before the first addition."""
        return None if self.rounded_exact is None else float(self.rounded_exact - self.exact)

    @property
    def adding_error(self) -> float | None:
        """The error from rounding the sum after each addition."""
        return None if self.rounded_exact is None else _difference(self.result, self.rounded_exact)


@dataclass(frozen=True)
class AccumulateStudy:
    """The sums of a number added `count` times."""

    text: str
    value: Fraction
    count: int
    rows: tuple[SumRow, ...]

    def records(self) -> list[dict[str, Any]]:
        """One JSON record for each sum, without curves."""
        return [
            {
                "value": self.text,
                "count": self.count,
                "method": row.method,
                "sum": row.sum_format,
                "addend": row.addend_format,
                "result": row.result,
                "exact": row.exact,
                "error": row.error,
                "relative_error": row.relative_error,
                "addend_error": row.addend_error,
                "adding_error": row.adding_error,
                "stagnation": row.stagnation,
                "spread": row.spread,
            }
            for row in self.rows
        ]


def study_accumulation(value: str = "0.01", count: int = 1000) -> AccumulateStudy:
    """Adds a number `count` times: in every combination of dtypes, with Kahan summation and stochastic rounding.

    Args:
        value: any finite number except 0, as text.
        count: the number of additions, 1 to 100,000.

    Example:
        >>> study = study_accumulation("0.01", 1000)
        >>> [(row.sum_format, row.addend_format, round(row.result, 4)) for row in study.rows[3:8]]
        [('fp32', 'fp32', 10.0001), ('fp32', 'fp16', 10.0021), ('fp32', 'bf16', 10.0098), \
('fp16', 'fp32', 9.9531), ('fp16', 'fp16', 9.9531)]
    """
    if not 1 <= count <= MOST:
        raise RecipeError(f"--count {count} is out of range", f"use 1 to {MOST}")
    exact = parse_number(value).value
    if exact is None or not SMALLEST <= abs(exact) <= LARGEST:
        raise RecipeError(
            f"--value {value.strip()} cannot be summed", "use a magnitude between 1e-300 and 1e300"
        )
    rows = [_plain_row(exact, count, total, addend) for total in SUMS for addend in ADDENDS]
    rows += [_plain_row(exact, count, "fp32", addend, cast=True) for addend in ("fp16", "bf16")]
    rows += [_kahan_row(exact, count, name) for name in ("fp16", "bf16")]
    rows.append(_stochastic_row(exact, count))
    return AccumulateStudy(value.strip(), exact, count, tuple(rows))


def _plain_row(
    exact: Fraction, count: int, sum_format: str, addend_format: str, *, cast: bool = False
) -> SumRow:
    addend = _tensor(exact, addend_format)
    if cast:
        addend = addend.to(_dtype(sum_format))
    total = torch.zeros((), dtype=_dtype(sum_format))

    def add() -> float:
        nonlocal total
        total += addend
        return total.item()

    method = Method.CAST if cast else Method.PLAIN
    return _row(method, exact, count, sum_format, addend_format, add)


def _kahan_row(exact: Fraction, count: int, name: str) -> SumRow:
    """Kahan summation in one dtype: the rounding error of each addition is added to the next addend."""
    addend = _tensor(exact, name)
    total, lost = torch.zeros((), dtype=_dtype(name)), torch.zeros((), dtype=_dtype(name))

    def add() -> float:
        nonlocal total, lost
        corrected = addend - lost
        new = total + corrected
        lost = (new - total) - corrected
        total = new
        return total.item()

    return _row(Method.KAHAN, exact, count, name, name, add)


def _stochastic_row(exact: Fraction, count: int) -> SumRow:
    """bf16 sums with stochastic rounding, one for each seed."""
    addend = _tensor(exact, "fp32")
    total_S = torch.zeros(SEEDS, dtype=torch.bfloat16)
    step = 0

    def add() -> float:
        nonlocal step
        step += 1
        stochastic_round_(total_S, total_S.float() + addend, seed=0, step=step, param_index=0)
        return float(total_S.double().mean())

    row = _row(Method.STOCHASTIC, exact, count, "bf16", "fp32", add)
    return replace(row, spread=(float(total_S.min()), float(total_S.max())))


def _row(
    method: Method,
    exact: Fraction,
    count: int,
    sum_format: str,
    addend_format: str,
    add: Callable[[], float],
) -> SumRow:
    """Adds `count` times and records the totals."""
    stored = FORMATS[addend_format].round(exact).value
    plain = method in (Method.PLAIN, Method.CAST)
    every = max(1, count // CURVE_POINTS)
    curve, before, stuck = [(0, 0.0)], 0.0, None
    for step in range(1, count + 1):
        if stuck is None:
            total = add()
            if plain and total == before:  # every further addition gives the same total
                stuck = step
        if step % every == 0 or step == count:
            curve.append((step, total))
        before = total
    return SumRow(
        method,
        sum_format,
        addend_format,
        before,
        exact * count,
        None if stored is None else stored * count,
        _stagnation(sum_format, stored, stuck) if plain else None,
        tuple(curve),
    )


def _stagnation(sum_format: str, addend: Fraction | None, step: int | None) -> Stagnation | None:
    """The first total at which half of the spacing is at least the addend: 0 or a power of two; None if the dtype
    overflows before it."""
    if addend is None:
        return None
    sum_dtype = FORMATS[sum_format]
    total = Fraction(0)
    while sum_dtype.spacing(total) / 2 < abs(addend):
        total = total * 2 or sum_dtype.smallest_normal
    if total > sum_dtype.largest:
        return None
    return Stagnation(-total if addend < 0 else total, sum_dtype.spacing(total), step)


def _difference(result: float, exact: Fraction) -> float:
    return float(Fraction(result) - exact) if math.isfinite(result) else result


def _dtype(name: str) -> torch.dtype:
    return getattr(torch, TORCH_NAMES[name])


def _tensor(value: Fraction, name: str) -> torch.Tensor:
    """A number rounded once from its exact value; via fp64 it could be rounded twice."""
    number = FORMATS[name].round(value)
    plain = float("inf") if number.value is None else float(number.value)
    return torch.tensor(-plain if number.value is None and number.negative else plain, dtype=_dtype(name))
