"""The last screen of a run: what changed, how far the plan was off, where everything is."""

from __future__ import annotations

from pathlib import Path

from rich.console import Group, RenderableType
from rich.constrain import Constrain
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trimtab.report.buckets import picture
from trimtab.report.live import Detail
from trimtab.report.plain import Excerpt, as_text
from trimtab.report.rundata import RunData
from trimtab.report.summary import (
    Sample,
    changes,
    first_label,
    memory_basis,
    memory_rows,
    memory_verdict,
    samples,
    speed,
)

WIDEST = 100
"""Columns beyond which nothing grows: long lines are hard to read."""
STYLES = {"better": "green", "worse": "red", "unchanged": "bright_black"}
MARKS = {"better": "▲", "worse": "▼", "unchanged": "·"}


def closing(data: RunData, detail: Detail = "full") -> RenderableType:
    """Everything a person wants to see when a run has ended.

    Example:
        >>> Console().print(closing(read_run(Path("runs/demo"))))  # doctest: +SKIP
    """
    if detail == "quiet":
        return _places(data)
    parts: list[RenderableType] = []
    if changes(data):
        parts += [_heading("What was gained, what was lost"), _changes_table(data)]
    if samples(data):
        parts += [_heading("Completions, before and after"), _samples(data)]
    if memory_rows(data):
        sentences = [s for s in (memory_verdict(data), memory_basis(data)) if s]
        if detail == "full":
            parts += [_heading("Memory: predicted beside measured"), picture(memory_rows(data))]
        if sentences:
            parts += [Text(""), as_text("\n".join(sentences))]
    if data.damaged_lines:
        parts += [
            Text(""),
            as_text(f"{data.damaged_lines} damaged lines in metrics.jsonl were left out", "yellow"),
        ]
    parts.append(Text(""))
    if speed(data):
        grid = Table.grid(padding=(0, 2))
        for name, value in speed(data).items():
            grid.add_row(Text(name, style="bright_black"), as_text(value))
        parts += [grid, Text("")]
    return Group(Constrain(Group(*parts), WIDEST), _places(data))


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
    """The path as given, or from here where that is shorter: one that fits in a line can be copied whole."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _changes_table(data: RunData) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bright_black", show_edge=False)
    table.add_column("measured", overflow="fold")
    table.add_column(first_label(data), justify="right", no_wrap=True)
    table.add_column("after", justify="right", no_wrap=True)
    table.add_column("change", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for change in changes(data):
        style = STYLES[change.outcome]
        before, after, difference = change.shown()
        mark = Text(f"{MARKS[change.outcome]} {change.label}", style=style)
        table.add_row(
            as_text(change.name), before, Text(after, style="bold"), Text(difference, style=style), mark
        )
    return table


def _samples(data: RunData) -> Group:
    blocks: list[RenderableType] = []
    for sample in samples(data):
        if blocks:
            blocks.append(Text(""))
        blocks.append(Excerpt(sample.prompt, "bold"))
        blocks.append(Padding(_completions(sample), (0, 0, 0, 2)))
    return Group(*blocks)


def _completions(sample: Sample) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    first = "before" if sample.steps[0] == 0 else f"step {sample.steps[0]}"
    grid.add_row(Text(first, style="yellow"), Excerpt(sample.before, "bright_black"))
    if sample.after is not None:
        grid.add_row(Text("after", style="green"), Excerpt(sample.after))
    return grid
