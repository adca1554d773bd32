"""Measurements of steps for the report: typed, grouped, looked up by settings. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.lab.samples import Samples
from trimtab.lab.step_settings import Kernels, Loss, Mode, Precision, TimedPart
from trimtab.lab.studies.step.result import StepResult, TimedStep
from trimtab.lab.study import CellOutcome, Measurement
from trimtab.report.distributions import t_quantile

NOTHING = "–"


@dataclass(frozen=True)
class Group:
    """The settings that all steps of a table share."""

    precision: Precision
    mode: Mode
    kernels: Kernels
    batch: int

    @property
    def name(self) -> str:
        """The name in titles.

        Example:
            >>> Group(Precision.BF16, Mode.EAGER, Kernels.FAST, 4).name
            'bf16, eager, fast kernels, batch 4'
        """
        return f"{self.precision.value}, {self.mode.value}, {self.kernels.value} kernels, batch {self.batch}"

    @property
    def id(self) -> str:
        """The id of its charts."""
        return f"{self.precision.value}-{self.mode.value}-{self.kernels.value}-{self.batch}"


@dataclass(frozen=True)
class Entry:
    """One cell: its settings, and its result or the reason why there is none."""

    timed: TimedStep
    outcome: CellOutcome
    message: str
    result: StepResult | None

    @staticmethod
    def of(measurement: Measurement) -> Entry:
        """Parses a record; raises DataError if it is damaged."""
        measured = measurement.outcome is CellOutcome.MEASURED
        return Entry(
            TimedStep.from_settings(measurement.cell.settings),
            measurement.outcome,
            measurement.message,
            StepResult.from_dict(measurement.result) if measured else None,
        )

    @property
    def group(self) -> Group:
        """The group of its table."""
        step = self.timed.step
        return Group(step.precision, self.timed.mode, step.kernels, step.batch)

    @property
    def row(self) -> tuple[str, int]:
        """(size, context): its row in the table."""
        return self.timed.step.size, self.timed.step.context

    @property
    def column(self) -> tuple[TimedPart, Loss]:
        """(part, loss): its column in the table."""
        return self.timed.part, self.timed.step.loss

    @property
    def samples(self) -> Samples | None:
        """Times by the host's clock."""
        return None if self.result is None else self.result.times.host


@dataclass(frozen=True)
class Grid:
    """Entries that differ in size, context, part and loss alone."""

    entries: tuple[Entry, ...]

    @property
    def rows(self) -> list[tuple[str, int]]:
        """(size, context) in the order of the cells."""
        return list(dict.fromkeys(entry.row for entry in self.entries))

    @property
    def columns(self) -> list[tuple[TimedPart, Loss]]:
        """(part, loss): parts in their order, the most frequent loss first."""
        columns = dict.fromkeys(entry.column for entry in self.entries)
        return sorted(
            columns, key=lambda column: (column[1] is not self.loss, list(TimedPart).index(column[0]))
        )

    @property
    def loss(self) -> Loss:
        """The loss of most columns."""
        losses = [loss for _, loss in dict.fromkeys(entry.column for entry in self.entries)]
        return max(losses, key=losses.count)

    def find(self, row: tuple[str, int], part: TimedPart, loss: Loss | None = None) -> Entry | None:
        """The entry of a row and a part, with the usual loss unless another is given; the last one measured."""
        column = (part, loss or self.loss)
        matches = [entry for entry in self.entries if entry.row == row and entry.column == column]
        return matches[-1] if matches else None

    def samples(self, row: tuple[str, int], part: TimedPart, loss: Loss | None = None) -> Samples | None:
        """The times of an entry; None where there are none."""
        entry = self.find(row, part, loss)
        return None if entry is None else entry.samples

    def result(self, row: tuple[str, int], part: TimedPart) -> StepResult | None:
        """The result of an entry; None where there is none."""
        entry = self.find(row, part)
        return None if entry is None else entry.result

    def reasons(self) -> str:
        """Why cells have no time, each reason once; empty if all cells have one."""
        reasons = dict.fromkeys(
            f"{entry.outcome.value}: {entry.message}" for entry in self.entries if entry.result is None
        )
        return "; ".join(reasons)


def grouped(entries: Sequence[Entry], key: Callable[[Entry], Any]) -> dict[Any, list[Entry]]:
    """Entries by a key, in their order."""
    groups: dict[Any, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(key(entry), []).append(entry)
    return groups


def shown_time(entry: Entry | None) -> str:
    """A cell of a table: mean ± standard deviation in ms, or the outcome."""
    if entry is None:
        return NOTHING
    if entry.samples is None:
        return entry.outcome.value
    return mean_and_deviation(entry.samples)


def mean_and_deviation(samples: Samples) -> str:
    """Milliseconds with three or four digits.

    Example:
        >>> mean_and_deviation(Samples((10.0, 10.5))), mean_and_deviation(Samples((0.5,)))
        ('10.2 ± 0.4', '0.500 ± 0.000')
    """
    digits = digits_of(samples.mean_ms)
    return f"{samples.mean_ms:.{digits}f} ± {samples.std_ms:.{digits}f}"


def digits_of(ms: float) -> int:
    """The number of digits to show after the decimal point."""
    return 1 if ms >= 10 else 2 if ms >= 1 else 3


def differ(a: Samples, b: Samples) -> bool:
    """Whether Welch's 95 % interval of the difference of two means excludes zero; False for single samples.

    Welch's interval allows unequal variances and numbers of samples: times before and after a change often have both.

    Example:
        >>> differ(Samples((10.0, 10.2)), Samples((12.0, 12.2))), differ(Samples((10.0, 14.0)), Samples((12.0, 12.2)))
        (True, False)
        >>> differ(Samples((10.0,)), Samples((20.0,)))
        False
    """
    if min(a.repetitions, b.repetitions) < 2:
        return False
    squares = [samples.std_ms**2 / samples.repetitions for samples in (a, b)]
    if not sum(squares):
        return a.mean_ms != b.mean_ms
    spread = sum(s**2 / (samples.repetitions - 1) for s, samples in zip(squares, (a, b), strict=True))
    quantile = t_quantile(0.05, sum(squares) ** 2 / spread)
    return abs(a.mean_ms - b.mean_ms) > quantile * math.sqrt(sum(squares))


def between(values: Sequence[float], form: Callable[[float], str]) -> str:
    """The range of values in words.

    Example:
        >>> between([1.0, 2.5], "{:.1f}".format), between([2.0, 2.0], "{:.1f}".format)
        ('1.0 to 2.5', '2.0')
    """
    low, high = form(min(values)), form(max(values))
    return low if low == high else f"{low} to {high}"


def flops_rate(per_second: float) -> str:
    """FLOP/s with three digits.

    Example:
        >>> flops_rate(6.51e10), flops_rate(7.128e14)
        ('65.1 GFLOP/s', '713 TFLOP/s')
    """
    scale, unit = (1e12, "T") if per_second >= 1e12 else (1e9, "G")
    value = per_second / scale
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {unit}FLOP/s"


def percent(share: float) -> str:
    """A percentage, with one decimal below 10 %.

    Example:
        >>> percent(0.0312), percent(0.5)
        ('3.1 %', '50 %')
    """
    return f"{100 * share:.1f} %" if abs(share) < 0.1 else f"{100 * share:.0f} %"
