"""Prints a document: on a terminal with tables that fit its width, bars and sparklines; as Markdown elsewhere."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table as Grid
from rich.text import Text as Line

from trimtab.report.axes import BYTES, format_value, unit_of
from trimtab.report.buckets import StackedBar
from trimtab.report.console import new_console
from trimtab.report.document import BarChart, Block, Chart, Code, Document, Histogram, LineChart, Table, Text
from trimtab.report.document_markdown import markdown
from trimtab.report.draw_bars import part_names, part_value, scale
from trimtab.report.draw_stack import Stack, moment_title, read_stack
from trimtab.report.plain import as_text, plain
from trimtab.report.progress import sparkline
from trimtab.report.tables import ABSENT, FAILURES, numeric_columns, pad_rows

MAX_WIDTH = 120
PROSE = 100
MOST_SERIES = 12
MAX_BARS = 16
COLORS = ("blue", "yellow", "green", "magenta", "red", "cyan", "bright_blue", "bright_black")
GAP = 3
"""Spaces between two columns of a table."""
MAX_NAME_CHARS = 40
"""Maximum characters of a name before a bar or a sparkline."""


def print_document(document: Document, console: Console | None = None) -> None:
    """Prints a document: formatted on a terminal, as Markdown to a file or a pipe.

    Example:
        >>> print_document(Document("A", (), (), "trimtab bench step"), Console(quiet=True))
    """
    console = console or new_console()
    if not console.is_terminal:
        console.print(Line(markdown(document)), soft_wrap=True, end="")
        return
    for part in console_parts(document, min(console.width, MAX_WIDTH)):
        console.print(part, width=min(console.width, MAX_WIDTH))


def console_parts(document: Document, width: int) -> Iterator[RenderableType]:
    """Yields the renderables of a document for a terminal of this width."""
    yield as_text(document.title, "bold", keep_newlines=False)
    if document.facts:
        yield as_text(" · ".join(document.facts), "bright_black", keep_newlines=False)
    for section in document.sections:
        yield Line("")
        yield as_text(section.title, "bold cyan", keep_newlines=False)
        for block in section.blocks:
            yield Line("")
            yield from _block(block, width)
    yield Line("")


def _block(block: Block, width: int) -> Iterator[RenderableType]:
    if isinstance(block, Text):
        yield from as_text(block.text.replace("`", "")).wrap(Console(width=width), min(width, PROSE))
    elif isinstance(block, Code):
        yield Padding(as_text(block.text), (0, 0, 0, 2))
    elif isinstance(block, Table):
        yield from console_tables(block, width)
    else:
        yield from _chart(block, width)


def console_tables(table: Table, width: int) -> Iterator[RenderableType]:
    """Yields a table, split into several if its columns do not fit; each part repeats the first column."""
    if table.title:
        yield as_text(table.title, "bold", keep_newlines=False)
    rows = [[plain(cell, keep_newlines=False) for cell in row] for row in pad_rows(table).rows]
    head = [plain(name, keep_newlines=False) for name in table.head]
    for number, columns in enumerate(_fitting(head, rows, width)):
        if number:
            yield Line("")
        yield _grid(head, rows, columns, numeric_columns(table), width)
    if table.note:
        yield as_text(table.note, "bright_black", keep_newlines=False)


def _fitting(head: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Iterator[list[int]]:
    """Yields groups of columns that fit the width; each contains the first column. Headings may wrap."""
    if not head:
        return
    needs = [GAP + _least(head, rows, i) for i in range(len(head))]
    first = min(needs[0], max(width // 2, 12))
    group, used = [0], first
    for i in range(1, len(head)):
        need = min(needs[i], max(width - first, 8))
        if used + need > width and len(group) > 1:
            yield group
            group, used = [0], first
        group.append(i)
        used += need
    yield group


def _widest(rows: Sequence[Sequence[str]], column: int) -> int:
    return max((cell_len(row[column]) for row in rows), default=0)


def _least(head: Sequence[str], rows: Sequence[Sequence[str]], column: int) -> int:
    """Returns the minimum width at which no cell and no word of the heading is broken."""
    return max(_widest(rows, column), *(cell_len(word) for word in head[column].split() or [""]))


def _widths(
    head: Sequence[str], rows: Sequence[Sequence[str]], columns: Sequence[int], width: int
) -> dict[int, int]:
    """Returns the width of each column. rich would cut off the last columns if headings have to wrap."""
    first, *others = columns
    widths = {i: _least(head, rows, i) for i in columns}
    widths[first] = min(widths[first], max(width // 2, 12) - GAP)
    for i in others:
        widths[i] = min(widths[i], max(width - widths[first] - 2 * GAP, 8 - GAP))
    spare = width - sum(widths.values()) - GAP * len(columns)
    for i in columns:
        more = max(0, min(cell_len(head[i]) - widths[i], spare))
        widths[i], spare = widths[i] + more, spare - more
    return widths


def _grid(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    columns: Sequence[int],
    right: Sequence[bool],
    width: int,
) -> Grid:
    grid = Grid(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), show_edge=False, header_style="bright_black")
    widths = _widths(head, rows, columns, width)
    for i in columns:
        grid.add_column(
            Line(head[i]),
            justify="right" if right[i] else "left",
            vertical="bottom" if right[i] else "top",
            overflow="fold",
            width=widths[i],
        )
    for row in rows:
        grid.add_row(*(Line(row[i], _style(row[i], first=i == 0)) for i in columns))
    return grid


def _style(cell: str, *, first: bool) -> str:
    text = cell.strip()
    if text in FAILURES:
        return "red"
    if text and text in ABSENT:
        return "bright_black"
    return "bold" if first else ""


def _chart(chart: Chart, width: int) -> Iterator[RenderableType]:
    label = f" ({chart.y_label})" if isinstance(chart, LineChart) and chart.y_label else ""
    yield as_text(chart.title + label, "bold", keep_newlines=False)
    if isinstance(chart, BarChart):
        drawn = _bars(chart, width)
    elif isinstance(chart, LineChart):
        drawn = _lines(chart, width)
    elif isinstance(chart, Histogram):
        drawn = _histogram(chart, width)
    else:
        drawn = _stack_lines(chart, width)
    yield drawn or Line("No values.", "bright_black")
    if chart.note:
        yield as_text(chart.note, "bright_black", keep_newlines=False)


def _name(text: str, width: int) -> Line:
    shown = as_text(text, keep_newlines=False)
    shown.truncate(max(6, min(MAX_NAME_CHARS, width // 3)), overflow="ellipsis")
    return shown


def _rows(*styles: str) -> Grid:
    """Returns a grid with a name column and one column per style."""
    grid = Grid.grid(padding=(0, 2, 0, 0))
    for style in ("", *styles):
        grid.add_column(no_wrap=True, style=style)
    return grid


def _lines(chart: LineChart, width: int) -> RenderableType | None:
    """Returns a sparkline per series, with its first and last value."""
    unit = unit_of(chart.y_label) if unit_of(chart.y_label) == BYTES else ""
    rows = []
    for series in chart.series[:MOST_SERIES]:
        values = [math.nan if y is None or (chart.log_y and y <= 0) else y for _, y in series.points]
        known = [(x, y) for (x, _), y in zip(series.points, values, strict=True) if math.isfinite(y)]
        heights = [math.log(v) if chart.log_y and math.isfinite(v) else v for v in values]
        ends = list(dict.fromkeys([known[0], known[-1]])) if known else []
        shown = " → ".join(format_value(y, unit) for _, y in ends) or "no values"
        rows.append(
            (_name(series.name, width), heights, shown, " to ".join(format_value(x) for x, _ in ends))
        )
    if all(shown == "no values" for _, _, shown, _ in rows):
        return None
    used = [max(cell_len(str(row[i])) for row in rows) for i in (0, 2, 3)]
    room = width - sum(used) - 8
    grid = _rows("cyan", "", "bright_black")
    for name, heights, shown, places in rows:
        grid.add_row(name, sparkline(heights, max(0, min(40, room))), shown, places if room >= 0 else "")
    more = len(chart.series) - MOST_SERIES
    parts: list[RenderableType] = [grid]
    if more > 0:
        parts.append(Line(f"{more} more are in the HTML report.", "bright_black"))
    return Group(*parts, as_text(f"over {chart.x_label}", "bright_black", keep_newlines=False))


def _bars(chart: BarChart, width: int) -> RenderableType | None:
    if not chart.bars:
        return None
    names = part_names(chart)
    colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(names)}
    whole = scale(chart)
    grid = Grid.grid(padding=(0, 2, 0, 0), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1, min_width=4)
    grid.add_column(no_wrap=True, justify="right")
    for bar in chart.bars[:MAX_BARS]:
        parts = [(part_value(value), colors[name]) for name, value in bar.parts]
        grid.add_row(
            _name(bar.name, width), StackedBar(parts, whole), as_text(bar.label, keep_newlines=False)
        )
    found: list[RenderableType] = [grid]
    if len(names) > 1:
        legend = Line("  ").join(
            Line(f"■ {plain(name, keep_newlines=False)}", colors[name]) for name in names
        )
        found.insert(0, legend)
    if len(chart.bars) > MAX_BARS:
        found.append(Line(f"{len(chart.bars) - MAX_BARS} more are in the HTML report.", "bright_black"))
    return Group(*found)


def _histogram(chart: Histogram, width: int) -> RenderableType | None:
    if len(chart.edges) < 2 or not any(any(counts) for _, counts in chart.counts):
        return None
    grid = _rows("cyan", "bright_black")
    for name, counts in chart.counts:
        columns = sparkline([float(count) for count in counts], max(8, min(60, width // 2)))
        grid.add_row(_name(name, width), columns, f"{sum(counts):,} values")
    unit = unit_of(chart.x_label)
    over = (
        f"{chart.x_label}, from {format_value(chart.edges[0], unit)} to {format_value(chart.edges[-1], unit)}"
    )
    return Group(grid, as_text(over, "bright_black", keep_newlines=False))


def _stack_lines(chart: Chart, width: int) -> RenderableType | None:
    assert not isinstance(chart, LineChart | BarChart | Histogram)
    stack = read_stack(chart)
    if stack is None:
        return None
    peak = format_value(stack.tops[stack.peak], chart.unit)
    moment = moment_title(chart, stack.x, stack.peak)
    parts = sorted(
        ((values[stack.peak], band.name) for band, values in zip(chart.bands, stack.values, strict=True)),
        reverse=True,
    )
    listed = ", ".join(f"{name} {format_value(value, chart.unit)}" for value, name in parts if value > 0)
    return Group(
        Line(_over_time(stack, max(8, min(80, width - 2))), "cyan"),
        as_text(f"peak {peak}, at {moment}: {listed}", keep_newlines=False),
        Line("The HTML report shows it by part, with zoom.", "bright_black"),
    )


def _over_time(stack: Stack, width: int) -> str:
    """Returns a sparkline of the maximum in each of `width` equal intervals, scaled from zero."""
    columns = [0.0] * width
    span = stack.end - stack.x[0]
    for start, end, top in zip(stack.x, [*stack.x[1:], stack.end], stack.tops, strict=True):
        first = min(int((start - stack.x[0]) / span * width), width - 1)
        last = min(max(math.ceil((end - stack.x[0]) / span * width), first + 1), width)
        for i in range(first, last):
            columns[i] = max(columns[i], top)
    return sparkline([0.0, *columns], width + 1)[1:]
