"""A document as Markdown: tables are tables, charts are pictures in a folder next to the file, or their values."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from trimtab.report.document import Block, Code, Document, Table, Text
from trimtab.report.plain import plain
from trimtab.report.tables import chart_table, numeric_columns, squared

PICTURES = "pictures"
"""The folder of pictures, next to the file."""
_ALWAYS = re.compile(r"[\\`]|<(?=[a-zA-Z/!?])|&(?=#?\w+;)")
_PAIRS = (
    (re.compile(r"\*(?=\S).*(?<=\S)\*", re.DOTALL), re.compile(r"\*")),
    (re.compile(r"(?<!\w)_(?=\S).*(?<=\S)_(?!\w)", re.DOTALL), re.compile(r"(?<!\w)_|_(?!\w)")),
    (re.compile(r"~(?=\S).*(?<=\S)~", re.DOTALL), re.compile("~")),
    (re.compile(r"\[.*\][(\[:]", re.DOTALL), re.compile(r"[\[\]]")),
)
"""(what makes a stretch of text emphatic, struck out or a link; what is escaped then). One sign alone does nothing."""
_LINE_START = re.compile(r"^(\s*\d*)([-+>#=.)])(?=\s|$|#|=)", re.MULTILINE)
"""What makes a line a heading, a quotation or an item of a list."""


def aligned_table(rows: Sequence[Sequence[str]], right: Sequence[bool] = ()) -> str:
    """A Markdown table of cells that also reads well in a terminal; the first row is the head.

    Args:
        rows: cells as they are written; `|` and line ends must be escaped already.
        right: of each column, whether it is aligned to the right.

    Example:
        >>> print(aligned_table([["case", "ms"], ["norm", "1.25"]], [False, True]), end="")
        | case |   ms |
        |------|-----:|
        | norm | 1.25 |
    """
    widths = [
        max(3, *(len(row[i]) for row in rows)) if right else max(len(row[i]) for row in rows)
        for i in range(len(rows[0]))
    ]
    sides = list(right) or [False] * len(widths)
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if side else cell.ljust(width)
            for cell, width, side in zip(row, widths, sides, strict=True)
        ]
        lines.append(f"| {' | '.join(cells)} |")
    rule = ["-" * (width + 1) + (":" if side else "-") for width, side in zip(widths, sides, strict=True)]
    lines.insert(1, f"|{'|'.join(rule)}|")
    return "\n".join(lines) + "\n"


def markdown(document: Document, pictures: Collection[str] = ()) -> str:
    """The document's text.

    Args:
        document: what to write.
        pictures: ids of charts that have a picture `<id>.png` in a folder `pictures` next to the file; the values of
            all others are written as tables.
    """
    parts = [f"# {_line(document.title)}", " · ".join(_line(fact) for fact in document.facts)]
    for section in document.sections:
        parts.append(f"## {_line(section.title)}")
        parts += [_block(block, pictures) for block in section.blocks]
    parts.append(f"Written by {_span(document.command)}.")
    return "\n\n".join(part.rstrip("\n") for part in parts if part) + "\n"


def _block(block: Block, pictures: Collection[str]) -> str:
    if isinstance(block, Text):
        return _LINE_START.sub(r"\1\\\2", escaped(plain(block.text)))
    if isinstance(block, Code):
        text = plain(block.text).rstrip("\n")
        fence = "`" * max(3, 1 + max((len(run) for run in re.findall("`+", text)), default=0))
        return f"{fence}\n{text}\n{fence}"
    if isinstance(block, Table):
        return _table(block)
    if block.id in pictures:
        note = f"\n\n{_line(block.note)}" if block.note else ""
        return f"![{_line(block.title)}]({PICTURES}/{block.id}.png){note}"
    table = chart_table(block)
    if table is None:
        return f"**{_line(block.title)}**: no values."
    return _table(table) + (f"\n{_line(block.note)}" if block.note else "")


def _table(table: Table) -> str:
    """Title, cells and note; a table without columns has no cells to show."""
    title = f"**{_line(table.title)}**\n\n" if table.title else ""
    note = f"\n{_line(table.note)}\n" if table.note else ""
    if not table.head:
        return title + note
    rows = [[_cell(cell) for cell in row] for row in (table.head, *squared(table).rows)]
    return title + aligned_table(rows, numeric_columns(table)) + note


def escaped(text: str) -> str:
    """Text in which nothing is read as Markdown or HTML, but `code` between backticks stays code.

    Example:
        >>> print(escaped("2 * 3, *c*, `a*b`, <b>, x[0]"))
        2 \\* 3, \\*c\\*, `a*b`, \\<b>, x[0]
    """
    parts = text.split("`")
    if len(parts) % 2 == 0:  # a backtick without its partner
        parts[-2:] = [f"{parts[-2]}`{parts[-1]}"]
    outside = [
        _ALWAYS.sub(lambda found: "&amp;" if found[0] == "&" else f"\\{found[0]}", part)
        for part in parts[::2]
    ]
    for pair, sign in _PAIRS:
        if pair.search(" ".join(outside)):
            outside = [sign.sub(lambda found: f"\\{found[0]}", part) for part in outside]
    parts[::2] = outside
    return "`".join(parts)


def _line(text: str) -> str:
    """One line of escaped text."""
    return escaped(plain(" ".join(text.split("\n")), keep_newlines=False))


def _cell(text: str) -> str:
    return _line(text).replace("|", "\\|")


def _span(text: str) -> str:
    """Text as code, whatever backticks it has."""
    shown = plain(text, keep_newlines=False)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", shown)), default=0))
    room = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{fence}{room}{shown}{room}{fence}"
