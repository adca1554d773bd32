"""Writes a document as Markdown; charts become links to pictures in a folder next to the file, or tables."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from trimtab.report.document import Block, Code, Document, Table, Text
from trimtab.report.plain import plain
from trimtab.report.tables import chart_table, numeric_columns, pad_rows

PICTURES = "pictures"
"""The folder of pictures, next to the file."""
_ALWAYS = re.compile(r"[\\`]|<(?=[a-zA-Z/!?])|&(?=#?\w+;)")
_PAIRS = (
    (re.compile(r"\*(?=\S).*(?<=\S)\*", re.DOTALL), re.compile(r"\*")),
    (re.compile(r"(?<!\w)_(?=\S).*(?<=\S)_(?!\w)", re.DOTALL), re.compile(r"(?<!\w)_|_(?!\w)")),
    (re.compile(r"~(?=\S).*(?<=\S)~", re.DOTALL), re.compile("~")),
    (re.compile(r"\[.*\][(\[:]", re.DOTALL), re.compile(r"[\[\]]")),
)
"""(pattern of emphasis, strikethrough or a link; characters to escape if it matches). A single one is harmless."""
_LINE_START = re.compile(r"^(\s*\d*)([-+>#=.)])(?=\s|$|#|=)", re.MULTILINE)
"""Matches the start of a heading, quotation or list item."""


def aligned_table(rows: Sequence[Sequence[str]], right: Sequence[bool] = ()) -> str:
    """Returns a Markdown table that is also aligned as plain text; the first row is the heading.

    Args:
        rows: cells in which `|` and newlines are already escaped.
        right: for each column, whether it is right-aligned.

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
    """Returns the document as Markdown.

    Args:
        document: the document.
        pictures: ids of charts with a picture `<id>.png` in the folder `pictures` next to the file; other charts are
            written as tables of their values.
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
    """Returns title, cells and note; without columns only title and note."""
    title = f"**{_line(table.title)}**\n\n" if table.title else ""
    note = f"\n{_line(table.note)}\n" if table.note else ""
    if not table.head:
        return title + note
    rows = [[_cell(cell) for cell in row] for row in (table.head, *pad_rows(table).rows)]
    return title + aligned_table(rows, numeric_columns(table)) + note


def escaped(text: str) -> str:
    """Escapes Markdown and HTML, except for `code` between backticks.

    Example:
        >>> print(escaped("2 * 3, *c*, `a*b`, <b>, x[0]"))
        2 \\* 3, \\*c\\*, `a*b`, \\<b>, x[0]
    """
    parts = text.split("`")
    if len(parts) % 2 == 0:  # an unpaired backtick
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
    """Returns the escaped text in one line."""
    return escaped(plain(" ".join(text.split("\n")), keep_newlines=False))


def _cell(text: str) -> str:
    return _line(text).replace("|", "\\|")


def _span(text: str) -> str:
    """Returns the text as inline code, even if it contains backticks."""
    shown = plain(text, keep_newlines=False)
    fence = "`" * (1 + max((len(run) for run in re.findall("`+", shown)), default=0))
    room = " " if shown.startswith("`") or shown.endswith("`") else ""
    return f"{fence}{room}{shown}{room}{fence}"
