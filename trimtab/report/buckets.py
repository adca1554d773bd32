"""Bars of the four memory buckets, predicted above measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from trimtab.facts.units import format_bytes

BUCKETS = ("weights", "gradients", "optimizer", "activations", "other")
COLORS = {
    "weights": "blue",
    "gradients": "magenta",
    "optimizer": "yellow",
    "activations": "green",
    "other": "bright_black",
}
EIGHTHS = " ▏▎▍▌▋▊▉█"


@dataclass(frozen=True)
class BucketSizes:
    """The size of each bucket at one moment of a run."""

    when: str
    """before, peak or after."""
    source: str
    """predicted or measured."""
    buckets: dict[str, Any]


def total(buckets: dict[str, Any]) -> int:
    """Returns the total bytes of all buckets."""
    return sum(int(buckets.get(name, 0)) for name in BUCKETS)


def shown_buckets(rows: list[BucketSizes]) -> list[str]:
    """Returns the names of the four buckets, and `other` if it is not empty."""
    return [name for name in BUCKETS if name != "other" or any(row.buckets.get(name) for row in rows)]


class StackedBar:
    """A stacked bar of (value, colour) parts; a total of `scale` fills the available width.

    Example:
        >>> StackedBar([(50, "blue"), (25, "magenta")], 100).text(8).plain
        '██████··'
    """

    def __init__(self, parts: Sequence[tuple[float, str]], scale: float) -> None:
        self.parts = parts
        self.scale = scale if scale > 0 else 1

    def text(self, width: int) -> Text:
        """Renders the bar with `width` characters; a non-empty bar is always visible."""
        text = Text()
        position = 0.0
        for value, color in self.parts:
            start = round(position)
            position += width * (value / self.scale)
            text.append("█" * (min(width, round(position)) - start), style=color)
        if not text.plain and position > 0:
            _, color = max(self.parts, key=lambda part: part[0])
            text.append(EIGHTHS[max(1, round(position * 8))], style=color)
        text.append("·" * (width - len(text.plain)), style="bright_black")
        return text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        yield self.text(options.max_width)


def bucket_bar(buckets: dict[str, Any], scale: int) -> StackedBar:
    """Returns a bar of all buckets, each in its colour."""
    return StackedBar([(int(buckets.get(name, 0)), COLORS[name]) for name in BUCKETS], scale)


def buckets_view(rows: list[BucketSizes]) -> RenderableType:
    """Returns a labelled stacked bar per row, and a table with the size of each bucket, predicted and measured."""
    scale = max((total(row.buckets) for row in rows), default=1)
    bars = Table.grid(padding=(0, 1), expand=True)
    bars.add_column(no_wrap=True)
    bars.add_column(no_wrap=True)
    bars.add_column(ratio=1)
    bars.add_column(justify="right", no_wrap=True)
    last = None
    for row in rows:
        label = row.when if row.when != last else ""
        last = row.when
        size = format_bytes(total(row.buckets))
        source = Text(row.source, "bright_black")
        bars.add_row(Text(label, "bold"), source, bucket_bar(row.buckets, scale), size)
    return Group(bars, Text(""), _numbers(rows))


def _numbers(rows: list[BucketSizes]) -> Table:
    numbers = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, header_style="bright_black")
    numbers.add_column("")
    several = len({row.source for row in rows}) > 1
    for row in rows:
        heading = f"{row.when}\n{row.source}" if several else row.when
        numbers.add_column(heading, justify="right", no_wrap=True)
    for name in shown_buckets(rows):
        cells = (format_bytes(int(row.buckets.get(name, 0))) for row in rows)
        numbers.add_row(Text(f"■ {name}", style=COLORS[name]), *cells)
    numbers.add_row(
        Text("  total", style="bold"),
        *(Text(format_bytes(total(row.buckets)), style="bold") for row in rows),
    )
    return numbers
