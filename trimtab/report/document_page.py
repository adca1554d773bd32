"""Writes a document as a self-contained HTML page: charts with values on hover, zoomable stacks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.report.document import (
    BarChart,
    Block,
    Chart,
    Code,
    Document,
    Histogram,
    LineChart,
    StackChart,
    Table,
    Text,
)
from trimtab.report.draw_bars import DrawnBars, draw_bars
from trimtab.report.draw_lines import draw_histogram, draw_lines
from trimtab.report.draw_stack import DRAWN_MOMENTS, MAX_MOMENTS, DrawnStack, draw_stack
from trimtab.report.drawing import Drawing
from trimtab.report.html import (
    figure_script,
    page_environment,
    policy,
    read_templates,
    script_json,
    write_html,
)
from trimtab.report.tables import ABSENT, FAILURES, chart_table, numeric_columns, pad_rows

MOST_BYTES = 2_400_000
"""Maximum size of all stacks of a page together; beyond it, each stack gets fewer points in time."""
FEWEST_MOMENTS = 250
PROBED_MOMENTS = 1_000
SHORT, LONG = 16, 40
"""Maximum characters of a text column that never wraps; minimum characters of one that gets extra width."""
LISTED_FROM = 5
"""Number of sections from which the page starts with a table of contents."""
_ID = re.compile(r"[A-Za-z0-9-]+")


@dataclass(frozen=True)
class Shown:
    """A block in the form that the template renders."""

    kind: str
    """text, code, table, lines, bars, stack or empty (a chart without values)."""
    title: str = ""
    note: str = ""
    words: tuple[tuple[bool, str], ...] = ()
    """For a text: (whether it is code, the text)."""
    text: str = ""
    table: ShownTable | None = None
    """The table, or the values of a chart."""
    drawn: Drawing | DrawnBars | DrawnStack | None = None


@dataclass(frozen=True)
class ShownTable:
    """Cells as (text, classes)."""

    head: list[tuple[str, str]]
    rows: list[list[tuple[str, str]]]
    note: str


def write_document_page(document: Document, target: Path) -> None:
    """Writes the page atomically, replacing an existing file.

    Raises:
        ResourceError: the file cannot be written.

    Example:
        >>> write_document_page(document, Path("lab/step/report.html"))  # doctest: +SKIP
    """
    write_html(render_document(document), target, option="--out")


def render_document(document: Document) -> str:
    """Returns the page's HTML."""
    charts = list(_charts(document))
    ids = [chart.id for chart in charts]
    assert len(set(ids)) == len(ids), f"two charts have one id: {sorted(ids)}"
    assert all(_ID.fullmatch(name) for name in ids), (
        f"an id contains other characters than letters, digits and dashes: {ids}"
    )
    drawn = _drawn(charts)
    figures = {
        name: picture.figure for name, picture in drawn.items() if isinstance(picture, Drawing | DrawnStack)
    }
    scripts = [figure_script(figures, "hover.js", "stack.js")] if figures else []
    styles = read_templates("page.css", "charts.css", "document.css")
    sections = [
        (section.title, [_shown(block, drawn) for block in section.blocks]) for section in document.sections
    ]
    return (
        page_environment()
        .get_template("document.html")
        .render(
            policy=policy(scripts, styles),
            scripts=scripts,
            styles=styles,
            title=document.title,
            facts=[fact for fact in document.facts if fact],
            sections=sections,
            listed=len(sections) >= LISTED_FROM,
            command=document.command,
        )
    )


def _charts(document: Document) -> Iterator[Chart]:
    for section in document.sections:
        for block in section.blocks:
            if not isinstance(block, Text | Code | Table):
                yield block


def _drawn(charts: list[Chart]) -> dict[str, Drawing | DrawnBars | DrawnStack]:
    """Draws the charts, by id, except those without values. Stacks are thinned to limit the size of the page."""
    found: dict[str, Drawing | DrawnBars | DrawnStack | None] = {}
    for chart in charts:
        if isinstance(chart, LineChart):
            found[chart.id] = draw_lines(chart)
        elif isinstance(chart, BarChart):
            found[chart.id] = draw_bars(chart)
        elif isinstance(chart, Histogram):
            found[chart.id] = draw_histogram(chart)
    stacks = [chart for chart in charts if isinstance(chart, StackChart)]
    found |= {chart.id: _draw_within(chart, MOST_BYTES // len(stacks), len(stacks)) for chart in stacks}
    return {name: picture for name, picture in found.items() if picture is not None}


def _draw_within(chart: StackChart, size: int, charts: int) -> DrawnStack | None:
    """Draws a stack with as many points in time as fit into about `size` characters."""
    drawn = max(FEWEST_MOMENTS, min(DRAWN_MOMENTS, 10 * DRAWN_MOMENTS // charts))
    tried = draw_stack(chart, most=PROBED_MOMENTS, drawn=drawn)
    if tried is None or len(chart.x) <= PROBED_MOMENTS:
        return tried
    # More points are closer together, so each of them takes at most as many characters as these.
    each = len(script_json(tried.figure)) / len(tried.figure["x"])
    room = int((size - sum(len(band.path) for band in tried.bands)) / each)
    return draw_stack(chart, most=max(FEWEST_MOMENTS, min(room, MAX_MOMENTS)), drawn=drawn)


def _shown(block: Block, drawn: dict[str, Any]) -> Shown:
    if isinstance(block, Text):
        return Shown("text", words=tuple(_words(block.text)))
    if isinstance(block, Code):
        return Shown("code", text=block.text)
    if isinstance(block, Table):
        return Shown("table", block.title, block.note, table=_table(block))
    if block.id not in drawn:
        return Shown("empty", block.title, block.note)
    kinds = {LineChart: "lines", Histogram: "lines", BarChart: "bars", StackChart: "stack"}
    values = chart_table(block) if isinstance(block, LineChart | Histogram) else None
    table = _table(values) if values is not None else None
    return Shown(kinds[type(block)], block.title, block.note, table=table, drawn=drawn[block.id])


def _words(text: str) -> Iterator[tuple[bool, str]]:
    """Splits a paragraph into (is code, text) at backticks."""
    parts = text.split("`")
    if len(parts) % 2 == 0:
        parts[-2:] = [f"{parts[-2]}`{parts[-1]}"]
    for i, part in enumerate(parts):
        if part:
            yield bool(i % 2), part


def _table(table: Table) -> ShownTable:
    rows = pad_rows(table).rows
    sides = ["n" if right else "" for right in numeric_columns(table)]
    for i in range(1, len(sides)):  # the style sheet sets the width of the first column
        longest = max((len(row[i]) for row in rows), default=0)
        sides[i] = sides[i] or ("short" if longest <= SHORT else "long" if longest > LONG else "words")
    shown = [
        [(cell, f"{side} {_tone(cell)}".strip()) for cell, side in zip(row, sides, strict=True)]
        for row in rows
    ]
    return ShownTable(list(zip(table.head, sides, strict=True)), shown, table.note)


def _tone(cell: str) -> str:
    """Returns the CSS class of a cell that contains a failure or no value."""
    text = cell.strip()
    return "cell-no" if text in FAILURES else "cell-none" if text and text in ABSENT else ""
