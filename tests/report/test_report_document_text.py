"""A document as Markdown and on a terminal: complete, within the width, and without markup."""

from __future__ import annotations

import re
from io import StringIO

import pytest
from rich.cells import cell_len
from rich.console import Console
from sample_documents import everything, hostile_document, memory, odd_charts, table, times
from test_report_terminal import OURS, is_inert

from trimtab.report.document import Bar, BarChart, Code, Document, LineChart, Section, Table, Text
from trimtab.report.document_console import print_document
from trimtab.report.document_markdown import aligned_table, escaped, markdown


def document(*blocks: object) -> Document:
    return Document("A title", ("a machine",), (Section("One", blocks),), "trimtab bench step")  # type: ignore[arg-type]


def shown(made: Document, width: int = 80, *, terminal: bool = True) -> str:
    console = Console(
        file=StringIO(),
        width=width,
        force_terminal=terminal,
        color_system="truecolor" if terminal else None,
        highlight=False,
        legacy_windows=False,
        _environ={"TERM": "xterm-256color"},
    )
    print_document(made, console)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def cells(line: str) -> list[str]:
    """Splits a row of a Markdown table into cells as a Markdown parser does."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_markdown_contains_the_whole_document() -> None:
    text = markdown(everything(), ["times-5", "kernels"])
    assert text.startswith(
        "# Step time of the study models\n\nNVIDIA H200, torch 2.11.0 · commit 0123456789 · 2026-11-18\n"
    )
    assert "## Step time\n\nBackward takes about twice as long as forward. `tf32` is off.\n" in text
    assert "![Forward and backward](pictures/times-5.png)" in text
    assert "![Time by kernel](pictures/kernels.png)\n\nKernels of less than 1 % are added up." in text
    assert "| total |" not in text
    assert "| total            |    16.9 GiB | 16.9 GiB |" in text, "a stack without a picture"
    assert "The peak is at backward, layer 11, event 203." in text
    assert "```\n3.14\n0 10000000" in text
    assert text.endswith("Written by `trimtab bench step`.\n")
    assert "\n\n\n" not in text


def test_numbers_are_aligned_to_the_right() -> None:
    lines = markdown(document(table())).splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("| size"))
    assert [rule.endswith(":") for rule in cells(lines[head + 1])] == [
        False,
        False,
        True,
        True,
        True,
        True,
        True,
    ]
    assert cells(lines[head + 4])[3] == "234.9 ± 1.2"
    assert len({len(line) for line in lines[head : head + 7]}) == 1


def test_cells_keep_their_column_for_any_content() -> None:
    rows = (("a|b", "1 | 2", "x\ny"), ("`c|d`", "\\|", ""))
    text = markdown(document(Table("T|t", ("h|1", "h2", "h3"), rows, "n|n")))
    inside = [line for line in text.splitlines() if line.startswith("|")]
    assert [len(cells(line)) for line in inside] == [3, 3, 3, 3]
    assert cells(inside[2]) == ["a\\|b", "1 \\| 2", "x y"]


def test_markdown_syntax_is_escaped() -> None:
    assert escaped("2*3*4 [a](b) <b> a_b _c_ `x*y` d`e &lt; & f~~g~~") == (
        "2\\*3\\*4 \\[a\\](b) \\<b> a_b \\_c\\_ `x*y` d\\`e &amp;lt; & f\\~\\~g\\~\\~"
    )
    assert escaped("aten::_softmax_backward_data and copy_") != "aten::_softmax_backward_data and copy_"
    for plain in ("x[0] of model.layers.*.mlp", "2 * 3 * 4", "a < b", "~5 ms", "R&D"):
        assert escaped(plain) == plain, "one sign alone does nothing"
    assert escaped("aten::_softmax") == "aten::_softmax"
    assert escaped("aten::copy_ of a_b") == "aten::copy_ of a_b"
    lines = ("1. one", "- two", "# three", "> four", "===", "+ five")
    text = markdown(document(*map(Text, lines)))
    for line in ("1\\. one", "\\- two", "\\# three", "\\> four", "\\===", "\\+ five"):
        assert f"\n{line}\n" in text
    assert "````\na ``` b\n````" in markdown(document(Code("a ``` b")))


def test_hostile_text_is_inert_in_markdown(hostile: str) -> None:
    text = markdown(hostile_document(hostile))
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u202e\ud800]", text)
    outside = re.sub(r"(`+)[^`].*?\1", "", text.replace("\n", " "))
    assert not re.search(r"(?<!\\)<(script|img|a|style)", outside)
    assert "](https" not in outside
    text.encode()


@pytest.mark.parametrize("chart", odd_charts(), ids=lambda chart: chart.id)
def test_unusual_charts_are_written_everywhere(chart: LineChart) -> None:
    made = document(chart)
    assert "## One" in markdown(made)
    assert "One" in shown(made)


def test_an_empty_document() -> None:
    nothing = Document("", (), (), "")
    assert markdown(nothing).endswith("Written by ``.\n")
    shown(nothing)
    shown(
        Document(
            "t", (), (Section("s", (Table("", (), ()), Table("x", ("a",), ()), Code(""), Text(""))),), "c"
        )
    )


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_the_terminal_shows_everything_within_its_width(width: int) -> None:
    made = everything()
    text = OURS.sub("", shown(made, width))
    assert max(cell_len(line) for line in text.splitlines()) <= min(width, 120)
    for section in made.sections:
        assert section.title in text
    for row in table().rows:
        for cell in row:
            assert cell in text, "no cell of a table is cut or wrapped"
    assert "110.0 ms (40 %)" in text
    assert "█" in text
    assert re.search("[▁▂▃▄▅▆▇]", text)
    assert "peak 16.9 GiB" in text


def test_a_table_that_is_too_wide_is_split_after_its_first_column() -> None:
    text = OURS.sub("", shown(document(table()), 40))
    assert text.count("medium") == 4, "once in each part"


def test_a_pipe_gets_markdown() -> None:
    assert shown(everything(), terminal=False) == markdown(everything())


def test_hostile_text_is_inert_on_a_terminal(hostile: str) -> None:
    for width in (40, 100):
        assert is_inert(shown(hostile_document(hostile), width))
    assert "[red]markup[/red]" in OURS.sub("", shown(document(Text("[red]markup[/red]"))))


def test_long_charts_are_truncated_on_a_terminal_with_a_hint() -> None:
    bars = tuple(Bar(f"kernel {i}", (("time", 1.0),), "1 ms") for i in range(30))
    text = OURS.sub("", shown(document(BarChart("b", "Bars", "ms", bars), times(20))))
    assert "kernel 15" in text
    assert "kernel 16" not in text
    assert "14 more are in the HTML report." in text
    assert "8 more are in the HTML report." in text


def test_the_sparkline_of_a_stack_is_scaled_by_time() -> None:
    text = OURS.sub("", shown(document(memory(2000)), 100))
    line = next(line for line in text.splitlines() if "█" in line)
    assert line.index("█") in range(38, 44), "the peak is in the middle"


def test_existing_tables_keep_their_format() -> None:
    assert aligned_table([["a", "b"], ["1", "22"]]) == "| a | b  |\n|---|----|\n| 1 | 22 |\n"
    assert (
        aligned_table([["a", "b"], ["1", "22"]], [False, True])
        == "| a   |   b |\n|-----|----:|\n| 1   |  22 |\n"
    )
