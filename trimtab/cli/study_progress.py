"""Progress of a study: a progress bar on a terminal, one line per cell elsewhere; counts of outcomes."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trimtab.facts.units import format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from trimtab.lab.study import Cell, Measurement


class StudyProgress:
    """Shows cells as they are measured, on standard error; `trimtab.lab.sweep.run_sweep` calls it.

    Example:
        >>> with StudyProgress(10) as progress:                                      # doctest: +SKIP
        ...     run_sweep(cells, folder, device="cpu", progress=progress)
    """

    def __init__(self, total: int, console: Console | None = None) -> None:
        from trimtab.report.console import new_console

        self.total = total
        self.console = console or new_console(file=sys.stderr)
        self.done = 0
        self.recorded = 0
        """Number of cells that were not measured because they have a record."""
        self._moving = self.console.is_terminal and not self.console.is_dumb_terminal
        self._bar: Any = None
        self._task: Any = None
        self._measures = False
        """Whether the current cell is being measured, and does not come from a record."""
        self._began: float | None = None
        """When the first measurement or preparation began."""
        self._measured = 0

    def __enter__(self) -> StudyProgress:
        if self._moving:
            from rich.progress import BarColumn, Progress, TextColumn
            from rich.table import Column

            name = TextColumn("{task.description}", markup=False, table_column=Column(ratio=1, no_wrap=True))
            self._bar = Progress(
                name,
                BarColumn(24),
                TextColumn("{task.completed}/{task.total}"),
                TextColumn("{task.fields[left]}", style="cyan"),
                console=self.console,
                transient=True,
                expand=True,
            )
            self._task = self._bar.add_task("", total=self.total, left="")
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int, cell: Cell, measurement: Measurement | None) -> None:
        """Reports that a cell starts (`measurement` is None) or has ended."""
        from trimtab.report.plain import plain

        self.done = done
        name = plain(cell.name, keep_newlines=False)
        if measurement is None:
            self._begin()
            self._measures = True
            self._move(name)
            return
        if self._measures:
            self._measured += 1
            self._tell(done, name, measurement)
        else:
            self.recorded += 1
        self._measures = False
        self._move(name)

    def preparing(self, done: int, total: int, cell: Cell | None) -> None:
        """Reports how many cells have what they need compiled."""
        from rich.text import Text

        from trimtab.report.plain import plain

        self._begin()
        name = "" if cell is None else f" {plain(cell.name, keep_newlines=False)}"
        if self._moving:
            self._move(f"compiling for {total} cells, {done} done")
        else:
            self.console.print(Text(f"[compiled {done}/{total}]{name}"), soft_wrap=True)

    def left(self) -> float | None:
        """Estimates the remaining seconds from the mean of the cells so far; None before the first."""
        if self._began is None or not self._measured:
            return None
        return (time.monotonic() - self._began) / self._measured * (self.total - self.done)

    def _begin(self) -> None:
        if self._began is None:
            self._began = time.monotonic()

    def _move(self, name: str) -> None:
        if self._bar is not None:
            left = self.left()
            text = f"{format_seconds(left)} left" if left else ""
            self._bar.update(self._task, completed=self.done, description=name, left=text)

    def _tell(self, done: int, name: str, measurement: Measurement) -> None:
        """Prints a line for a cell; on a terminal only for a cell that could not be measured."""
        from rich.text import Text

        from trimtab.lab.study import CellOutcome
        from trimtab.lab.sweep import UNFINISHED
        from trimtab.report.plain import plain

        outcome = measurement.outcome
        if self._moving and outcome is CellOutcome.MEASURED:
            return
        reason = plain(f": {measurement.message}", keep_newlines=False) if measurement.message else ""
        ended = "" if outcome is CellOutcome.MEASURED else f": {outcome.value}{reason}"
        style = "red" if outcome in UNFINISHED else ""
        line = f"[{done}/{self.total}] {name}{ended} ({format_seconds(measurement.seconds)})"
        self.console.print(Text(line, style), soft_wrap=True)


def count_outcomes(measurements: Sequence[Measurement]) -> str:
    """Returns the number of cells per outcome, in one line.

    Example:
        >>> count_outcomes([])
        '0 cells'
    """
    from trimtab.lab.study import CellOutcome

    counts = Counter(measurement.outcome for measurement in measurements)
    outcomes = ", ".join(f"{counts[outcome]} {outcome.value}" for outcome in CellOutcome if counts[outcome])
    cells = f"{len(measurements)} cell{'' if len(measurements) == 1 else 's'}"
    return f"{cells}: {outcomes}" if outcomes else cells


def has_failed(measurements: Sequence[Measurement]) -> bool:
    """Whether a cell failed or timed out; out of memory and unsupported cells count as results."""
    from trimtab.lab.sweep import UNFINISHED

    return any(measurement.outcome in UNFINISHED for measurement in measurements)
