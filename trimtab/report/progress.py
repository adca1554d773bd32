"""Progress in two lines: a bar with the remaining time, and the loss with speed and memory."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.constrain import Constrain
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trimtab.facts.units import format_bytes, format_count, format_rate, format_seconds
from trimtab.report.plain import plain

MAX_WIDTH = 100
SPARKS = "▁▂▃▄▅▆▇█"
MAX_LOSSES = 4096
"""Maximum number of losses in memory for the sparkline; beyond it, every second loss is dropped."""


def sparkline(values: list[float], width: int) -> str:
    """Draws values as at most `width` small columns of averages; non-finite values are gaps.

    Example:
        >>> sparkline([3.0, 2.0, 1.0], 10)
        '█▅▁'
    """
    width = min(width, len(values))
    columns = []
    for i in range(width):
        part = values[i * len(values) // width : (i + 1) * len(values) // width]
        finite = [v for v in part if math.isfinite(v)]
        columns.append(sum(finite) / len(finite) if finite else math.nan)
    known = [v for v in columns if math.isfinite(v)]
    if not known:
        return " " * width
    # Values are halved because the difference of two floats may overflow.
    low, span = min(known) / 2, max(known) / 2 - min(known) / 2
    return "".join(
        " " if not math.isfinite(v) else SPARKS[int((v / 2 - low) / span * 7 + 0.5)] if span else SPARKS[0]
        for v in columns
    )


@dataclass
class Training:
    """The progress of training, rendered as two lines of any width.

    Example:
        >>> state = Training(total=4)
        >>> record = {"step": 2, "loss": 1.5, "tokens_per_second": 2000, "seconds": 6, "memory_bytes": 2**30}
        >>> state.update(record)
        >>> state.line()
        'step 2/4  loss 1.5000  2.00 K tokens/s  1.00 GiB  6.0 s left'
    """

    total: int
    step: int = 0
    loss: float = math.nan
    rate: float = 0.0
    memory: float = 0.0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    _first: tuple[int, float] | None = None

    def update(self, record: dict[str, Any]) -> None:
        """Updates the progress from a record of kind train."""
        self.step = int(record["step"])
        self.loss = float(record["loss"])
        self.rate = float(record["tokens_per_second"])
        self.memory = float(record["memory_bytes"])
        self.seconds = float(record["seconds"])
        self.losses.append(self.loss)
        if len(self.losses) > MAX_LOSSES:
            del self.losses[::2]
        if self._first is None:
            self._first = (self.step, time.monotonic())

    def left(self) -> float | None:
        """Estimates the remaining seconds, including evaluations after the first ones; None if unknown."""
        if self._first is None or self.step == 0 or not self.total:
            return None
        step, clock = self._first
        # At first only the loop's own time is known; later the wall time, which includes evaluations, is used.
        pace = (
            (time.monotonic() - clock) / (self.step - step)
            if self.step - step > 4
            else self.seconds / self.step
        )
        return max(0.0, pace * (self.total - self.step))

    def line(self) -> str:
        """Returns the progress in one line, for logs."""
        of = f"/{self.total}" if self.total else ""
        parts = [f"step {self.step:>{len(str(self.total))}}{of}", *self._facts()]
        left = self.left()
        return "  ".join([*parts, f"{format_seconds(left)} left"] if left is not None else parts)

    def _facts(self) -> list[str]:
        facts = [f"loss {self.loss:.4f}", f"{format_rate(self.rate)} tokens/s"]
        return [*facts, format_bytes(self.memory)] if self.memory else facts

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        left = self.left()
        share = self.step / self.total if self.total else 0.0
        ends = "" if left is None else f"{format_seconds(left)} left" if self.step < self.total else "done"
        yield _bar_line("training", self.step, self.total, f"{self.step}/{self.total}  {share:.0%}", ends)
        loss, *others = self._facts()
        tail = "   " + "   ".join(others)
        room = min(options.max_width, MAX_WIDTH) - len(loss) - len(tail) - 3
        graph = sparkline(self.losses, max(0, min(32, room)))
        yield Text.assemble((loss, "bold"), "  ", (graph, "cyan"), (tail, "bright_black"), no_wrap=True)


@dataclass
class PreparationProgress:
    """The progress of a preparation, such as tokenizing, in one line."""

    what: str
    done: int
    total: int | None
    unit: str

    def amount(self) -> str:
        """Returns the completed amount with its unit."""
        if self.unit == "bytes":
            return format_bytes(self.done)
        return f"{format_count(self.done)} {plain(self.unit)}".rstrip()

    def line(self) -> str:
        """Returns the progress in one line, for logs."""
        of = (
            f" of {format_bytes(self.total) if self.unit == 'bytes' else format_count(self.total)}"
            if self.total
            else ""
        )
        finished = self.total is not None and self.done >= self.total
        return f"{plain(self.what)}: {self.amount()}{'' if finished else of}"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        share = f"{self.done / self.total:.0%}" if self.total else ""
        yield _bar_line(plain(self.what, keep_newlines=False), self.done, self.total, self.amount(), share)


def _bar_line(what: str, done: int, total: int | None, amount: str, ends: str) -> RenderableType:
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True, overflow="ellipsis", max_width=40)
    grid.add_column(ratio=1, min_width=8)
    grid.add_column(justify="right", no_wrap=True)
    grid.add_column(justify="right", no_wrap=True, style="cyan")
    bar = ProgressBar(total=total or None, completed=min(done, total or done), pulse=not total)
    grid.add_row(Text(what), bar, Text(amount), Text(ends))
    return Constrain(grid, MAX_WIDTH)
