"""Data cannot move the cursor, colour the terminal or be parsed as markup."""

from __future__ import annotations

import unicodedata
from io import StringIO

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from trimtab.report.plain import KEPT_FORMAT, Excerpt, as_text, plain

PIECES = st.sampled_from(
    [
        "[/b]",
        "[red]",
        "[link=x]",
        "\x1b[31m",
        "\x1b]8;;http://x\x07",
        "\u202e",
        "\u2028",
        "\x9b",
        "\r",
        ":smile:",
        "\\[",
    ]
)
NASTY = st.lists(st.one_of(st.text(st.characters(), max_size=8), PIECES), max_size=8).map("".join)
# Wide and combining characters change how lines wrap, which the printing tests do not cover.
NARROW = st.lists(st.one_of(st.text(st.characters(max_codepoint=0x2FF), max_size=8), PIECES), max_size=8).map(
    "".join
)


def printed(renderable: object, width: int = 10_000) -> str:
    out = StringIO()
    console = Console(file=out, force_terminal=True, color_system=None, width=width, legacy_windows=False)
    console.print(renderable)
    return out.getvalue()


@given(NASTY)
def test_plain_removes_control_characters(text: str) -> None:
    shown = plain(text)
    for character in shown:
        assert character == "\n" or character in KEPT_FORMAT or unicodedata.category(character) not in (
            "Cc", "Cf", "Cs", "Zl", "Zp"
        )  # fmt: skip
    shown.encode("utf-8")


@given(NASTY)
def test_plain_is_idempotent(text: str) -> None:
    assert plain(plain(text)) == plain(text)


@given(st.text(st.characters(categories=["L", "N", "P", "S", "Zs"]), max_size=50))
def test_ordinary_text_is_unchanged(text: str) -> None:
    assert plain(text) == text


@given(NARROW)
def test_printed_text_equals_plain(text: str) -> None:
    shown = printed(as_text(text, keep_newlines=False))
    assert shown.rstrip() == plain(text, keep_newlines=False).rstrip()


def test_escapes_are_visible() -> None:
    assert plain("a\x1bb\u202ec\U000e0001d\te\x00") == "a\\x1bb\\u202ec\\U000e0001d    e\\x00"
    assert plain("a\nb", keep_newlines=False) == "a⏎b"
    assert plain("नमस्ते \u200d שלום 👩\u200d🔬") == "नमस्ते \u200d שלום 👩\u200d🔬"


@given(NASTY, st.integers(1, 6), st.integers(4, 40))
def test_an_excerpt_fits_its_lines_and_width(text: str, lines: int, width: int) -> None:
    out = StringIO()
    console = Console(file=out, color_system=None, width=width)
    console.print(Excerpt(text, lines=lines))
    shown = out.getvalue()
    assert shown.count("\n") <= max(lines, -(-26 // width) + 2)  # the note about white space may be wrapped
    assert "\x1b" not in shown
    assert "\r" not in shown


def test_a_truncated_excerpt_ends_with_an_ellipsis() -> None:
    assert printed(Excerpt("one\n\n\ntwo"), width=20).split() == ["one", "two"]
    assert "…" not in printed(Excerpt("a\nb\nc\nd", lines=4))
    cut = printed(Excerpt("a\nb\nc\nd\ne", lines=4)).splitlines()
    assert [line.strip() for line in cut] == ["a", "b", "c", "d …"]
    assert "white space" in printed(Excerpt(" \n\t "))
    assert len(printed(Excerpt("x" * 10_000_000))) < 50_000
