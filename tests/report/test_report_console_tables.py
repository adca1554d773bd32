"""Tables on terminals of any width: no cell is truncated, and no line exceeds the terminal."""

from __future__ import annotations

import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from trimtab.report.console import new_console
from trimtab.report.document import Table
from trimtab.report.document_console import console_tables

HEAD = (
    "scheme",
    "one scale for each",
    "bytes per value",
    "rms error",
    "largest error",
    "signal to noise, dB",
)
ROWS = tuple(
    (
        f"{name}, scales in 8 bits",
        f"{block} values",
        f"1.{block}",
        f"0.000{block}",
        f"0.00{block}5",
        f"{block}.4",
    )
    for name, block in (("int8 absmax", 32), ("nf4", 64), ("nf4", 4096))
)


def drawn(table: Table, width: int) -> list[str]:
    console: Console = new_console(file=io.StringIO(), width=width)
    for part in console_tables(table, width):
        console.print(part)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", range(44, 130, 3))
def test_every_cell_is_shown_completely(width: int) -> None:
    lines = drawn(Table("Errors", HEAD, ROWS), width)
    assert max(cell_len(line.rstrip()) for line in lines) <= width
    shown = [line.split() for line in lines]
    for row in ROWS:
        for cell in row[2:]:
            assert any(cell in words for words in shown), (width, cell)
    for word in " ".join(HEAD).split():
        assert any(word in words for words in shown), (width, word)


def test_headings_use_one_line_if_they_fit() -> None:
    lines = drawn(Table("", HEAD, ROWS), 140)
    assert lines[0].split() == " ".join(HEAD).split()
