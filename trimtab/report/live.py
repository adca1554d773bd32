"""Live output during a run: plan, progress, messages. Plain lines if the output is not a terminal."""

from __future__ import annotations

import time
from typing import Any, Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live

from trimtab.facts.units import format_seconds
from trimtab.report.console import new_console
from trimtab.report.example import example_view
from trimtab.report.plain import as_text
from trimtab.report.plan_panel import plan_panel
from trimtab.report.progress import PreparationProgress, Training
from trimtab.report.receipt import receipt_lines
from trimtab.report.rundata import section
from trimtab.report.summary import signed

Detail = Literal["quiet", "short", "full"]
"""Level of detail: messages only; the plan and a few lines per evaluation; every bucket and probe category."""
LINE_EVERY_SECONDS = 5.0
"""Minimum interval between progress lines of a preparation if the output is not a terminal."""


class LiveView:
    """Shows a run: `record` takes metrics, `working` the progress of preparations, `message` a line of text.

    On a terminal, progress bars are at the bottom and all other output is above them. Elsewhere (a file, a CI log) the
    output is plain lines: one for every `logging_steps` training steps.

    Example:
        >>> view = LiveView(total_steps=10, console=Console(quiet=True))
        >>> view.message("hello")
        >>> view.close()
    """

    def __init__(
        self, total_steps: int = 0, console: Console | None = None, *, detail: Detail = "short"
    ) -> None:
        self.console = console or new_console()
        self.total_steps = total_steps
        self.logging_steps = 1
        """Training steps per line if the output is not a terminal."""
        self.detail = detail
        self._moving = self.console.is_terminal and not self.console.is_dumb_terminal and detail != "quiet"
        self._live: Live | None = None
        self._training: Training | None = None
        self._working: dict[str, PreparationProgress] = {}
        self._printed: dict[str, float] = {}
        self.first_losses: dict[str, float] = {}
        """First loss of each evaluation set, the reference for later ones; a resumed run reads it from its metrics."""

    def plan(self, plan: dict[str, Any]) -> None:
        """Prints the plan of the run before training starts."""
        self.close()
        if self.detail != "quiet":
            self.console.print(plan_panel(plan, self.console.width, full=self.detail == "full"))

    def message(self, text: str) -> None:
        """Prints a line of text."""
        self._line(text)

    def progress(self, what: str, done: int, total: int | None, unit: str = "") -> None:
        """Shows the progress of a preparation: reading, tokenizing, downloading."""
        if self.detail == "quiet":
            return
        state = PreparationProgress(what, done, total, unit)
        if total is not None and done >= total:
            self._working.pop(what, None)
            if self._printed.get(what) != float("inf"):
                self._line(state.line())
            self._printed[what] = float("inf")
        elif self._moving:
            self._working[what] = state
        elif self._due(what):
            self._line(state.line())
        self._draw()

    def record(self, record: dict[str, Any]) -> None:
        """Shows a metrics record of the training loop."""
        kind = record["kind"]
        if self.detail == "quiet" and kind != "event":
            return
        if kind == "train":
            self._train(record)
        elif kind == "eval":
            loss, name = float(record["loss"]), record["name"]
            first = self.first_losses.setdefault(name, loss)
            change = "" if first == loss else f" ({signed(loss - first)})"
            perplexity = f"perplexity {float(record['perplexity']):.2f}"
            self._at_step(record, f"{name} loss {loss:.4f}{change}, {perplexity}", "bold" if change else "")
        elif kind == "answers":
            self._at_step(record, f"exact answers {record['exact']} of {record['total']}")
        elif kind == "probe":
            self._at_step(record, self._probe(record))
        elif kind == "receipt":
            for line in receipt_lines(record):
                self._at_step(record, line)
        elif kind == "compile":
            graphs = f"{record['count']} graph{'s' if record['count'] != 1 else ''}"
            text = f"compiled {graphs} in {format_seconds(record['seconds'])}"
            if "first_step_seconds" in record:
                text += f"; the first step took {format_seconds(record['first_step_seconds'])}"
            self._at_step(record, text)
        elif kind == "event":
            self._line(str(record["message"]), "yellow")
        elif kind == "example":
            self.console.print(example_view(record, self.console), soft_wrap=not self._moving)

    def close(self) -> None:
        """Stops the live display and prints the final progress of training."""
        if self._live is not None:
            self._live.stop()
            self._live = None
            if self._training is not None:
                self.console.print(self._training)
        self._training = None
        self._working.clear()

    def __enter__(self) -> LiveView:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _probe(self, record: dict[str, Any]) -> str:
        """Formats the total over all categories, or each category with full detail or unknown item counts."""
        scores, items = record["scores"], section(record, "items")
        if self.detail == "full" or not items:
            return "probe: " + ", ".join(f"{name} {float(share):.0%}" for name, share in scores.items())
        right = sum(round(float(scores[name]) * count) for name, count in items.items())
        return f"probe {right} of {sum(items.values())} right"

    def _train(self, record: dict[str, Any]) -> None:
        if self._training is None:
            self._training = Training(self.total_steps)
        self._training.update(record)
        step = self._training.step
        if not self._moving and (step % self.logging_steps == 0 or step == self.total_steps):
            self._line(self._training.line())
        self._draw()

    def _at_step(self, record: dict[str, Any], text: str, style: str = "") -> None:
        width = len(str(self.total_steps or 1000))
        self._line(f"step {int(record.get('step', 0)):>{width}}  {text}", style)

    def _due(self, what: str) -> bool:
        """Whether a progress line for `what` may be printed now; if so, restarts its interval."""
        now = time.monotonic()
        if now - self._printed.get(what, -LINE_EVERY_SECONDS) < LINE_EVERY_SECONDS:
            return False
        self._printed[what] = now
        return True

    def _line(self, text: str, style: str = "") -> None:
        # rich would wrap the lines of a log at 80 columns.
        self.console.print(as_text(text, style), soft_wrap=not self._moving)

    def _draw(self) -> None:
        """Updates the progress at the bottom of the terminal; removes it when nothing is in progress."""
        if not self._moving:
            return
        shown: list[RenderableType] = [*self._working.values(), *([self._training] if self._training else [])]
        if not shown:
            self.close()
            return
        if self._live is None:
            self._live = Live(console=self.console, refresh_per_second=8, transient=True)
            self._live.start()
        self._live.update(Group(*shown))
