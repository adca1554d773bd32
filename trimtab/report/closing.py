"""The summary at the end of a run: changes in evaluations, error of the plan, paths of the results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.constrain import Constrain
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trimtab.report.buckets import buckets_view
from trimtab.report.live import Detail
from trimtab.report.plain import Excerpt, as_text
from trimtab.report.rundata import RunData
from trimtab.report.summary import SampleCompletion, memory_basis, memory_rows, memory_verdict, samples, speed
from trimtab.report.verdicts import LABELS, MeasuredChange, changes, first_label, verdict

MAX_WIDTH = 100
"""Maximum width in columns: long lines are hard to read."""
GAP = 2
MIN_EVIDENCE_WIDTH = 18
"""Minimum width of the evidence column, as for `+54 −0, p < 0.001`."""
STYLES = {"better": "green", "worse": "red", "unchanged": "bright_black", "untested": "yellow"}
MARKS = {"better": "▲", "worse": "▼", "unchanged": "·", "untested": "?"}


def closing_summary(data: RunData, detail: Detail = "full") -> RenderableType:
    """Returns the summary of a finished run.

    Example:
        >>> Console().print(closing_summary(read_run(Path("runs/demo"))))  # doctest: +SKIP
    """
    if detail == "quiet":
        return Group(*(as_text(problem, "yellow") for problem in data.problems()), _places(data))
    parts: list[RenderableType] = []
    rows = changes(data)
    if rows:
        shown = ChangesView(rows, every_category=detail == "full")
        parts += [_heading("Improvements and regressions"), shown]
        parts += [Text(""), as_text(verdict(rows).explanation(), "bright_black")]
    if samples(data):
        parts += [_heading("Completions, before and after"), _samples(data)]
    if memory_rows(data):
        verdict_on_memory, basis = memory_verdict(data), memory_basis(data)
        sentences = [s for s in (verdict_on_memory, basis) if s]
        if detail != "full" and verdict_on_memory is None:
            sentences = []  # the basis explains a measurement, and none is shown
        if detail == "full":
            parts += [_heading("Memory: predicted and measured"), buckets_view(memory_rows(data))]
        if sentences:
            parts += [Text(""), as_text("\n".join(sentences))]
    for problem in data.problems():
        parts += [Text(""), as_text(problem, "yellow")]
    parts.append(Text(""))
    if speed(data):
        grid = Table.grid(padding=(0, 2))
        for name, value in speed(data).items():
            grid.add_row(Text(name, style="bright_black"), as_text(value))
        parts += [grid, Text("")]
    return Group(Constrain(Group(*parts), MAX_WIDTH), _places(data))


def _heading(words: str) -> Text:
    return Text(f"\n{words}\n", style="bold")


def _places(data: RunData) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("run folder", as_text(_shortest(data.folder), "bold"))
    report = data.folder / "report.html"
    if report.is_file():
        grid.add_row("report", as_text(_shortest(report), "bold"))
    return grid


def _shortest(path: Path) -> str:
    """Returns the path relative to the working directory if it is inside, so that it is easier to copy."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


class ChangesView:
    """Evaluations grouped by outcome, with the same column widths in each group.

    Without `every_category`, probe categories without a measurable change are only counted.
    """

    def __init__(self, rows: list[MeasuredChange], *, every_category: bool = True) -> None:
        self.left_out = [] if every_category else [row for row in rows if _is_unchanged_category(row)]
        rows = [row for row in rows if row not in self.left_out]
        self.rows = rows
        numbers = [(first_label(rows), "after", "change"), *(row.shown() for row in rows)]
        self.widths = [max(map(len, column)) for column in zip(*numbers, strict=True)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        name = 2 + max(len(row.name) for row in self.rows)
        # Names and evidence share the remaining width; names wrap only if the evidence would not fit.
        rest = options.max_width - sum(self.widths) - 4 * GAP
        name = max(8, min(name, rest - MIN_EVIDENCE_WIDTH))
        heads = [
            Text(head, style="bright_black")
            for head in ("measured", first_label(self.rows), "after", "change", "")
        ]
        yield self._table(name, [heads])
        for outcome, label in LABELS.items():
            found = [row for row in self.rows if row.outcome == outcome]
            if found:
                yield Text(f"{MARKS[outcome]} {label}", style=STYLES[outcome])
                yield self._table(name, [self._cells(row, STYLES[outcome]) for row in found])
        if self.left_out:
            count = len(self.left_out)
            yield Text(f"  and {count} categories of the probe, listed in the report", style="bright_black")

    def _table(self, name: int, rows: list[list[Text]]) -> Table:
        table = Table.grid(padding=(0, GAP, 0, 0))
        table.add_column(width=name, overflow="fold")
        for width in self.widths:
            table.add_column(width=width, justify="right", no_wrap=True)
        table.add_column(overflow="fold")
        for cells in rows:
            table.add_row(*cells)
        return table

    def _cells(self, row: MeasuredChange, style: str) -> list[Text]:
        before, after, difference = row.shown()
        evidence = as_text(row.evidence(), "bright_black", keep_newlines=False)
        name = as_text(f"  {row.name}", keep_newlines=False)
        return [name, Text(before), Text(after, style="bold"), Text(difference, style=style), evidence]


def _is_unchanged_category(row: MeasuredChange) -> bool:
    return row.outcome == "unchanged" and row.name.startswith("probe: ") and row.name != "probe: all"


def _samples(data: RunData) -> Group:
    blocks: list[RenderableType] = []
    for sample in samples(data):
        if blocks:
            blocks.append(Text(""))
        blocks.append(Excerpt(sample.prompt, "bold"))
        blocks.append(Padding(_completions(sample), (0, 0, 0, 2)))
    return Group(*blocks)


def _completions(sample: SampleCompletion) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    first = "before" if sample.steps[0] == 0 else f"step {sample.steps[0]}"
    grid.add_row(Text(first, style="yellow"), Excerpt(sample.before, "bright_black"))
    if sample.after is not None:
        grid.add_row(Text("after", style="green"), Excerpt(sample.after))
    return grid
