"""Makes text from data, models and files safe to print: no control characters, no markup."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator

from rich.console import Console, ConsoleOptions
from rich.text import Text

# Format characters (Cf) can reorder or hide the following text; a few occur in ordinary scripts and emoji.
KEPT_FORMAT = {"\u200c", "\u200d", "\u00ad"}
# Control, surrogate, line separator, paragraph separator: they move the cursor or cannot be encoded.
SHOWN_CATEGORIES = {"Cc", "Cs", "Zl", "Zp"}


def plain(text: str, *, keep_newlines: bool = True) -> str:
    """Replaces control and reordering characters by visible escapes.

    Example:
        >>> plain("a\\x1b[31mb")
        'a\\\\x1b[31mb'
    """
    if text.isascii() and text.isprintable():  # most text; the loop below costs 0.2 µs per character
        return text
    return "".join(_shown(c, keep_newlines) for c in text)


def _shown(character: str, keep_newlines: bool) -> str:
    if character == "\n":
        return "\n" if keep_newlines else "⏎"
    if character == "\t":
        return "    "
    category = unicodedata.category(character)
    if category in SHOWN_CATEGORIES or (category == "Cf" and character not in KEPT_FORMAT):
        code = ord(character)
        return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
    return character


def as_text(text: str, style: str = "", *, keep_newlines: bool = True) -> Text:
    """Returns `plain` text as a rich Text, so that brackets are not parsed as markup."""
    return Text(plain(text, keep_newlines=keep_newlines), style=style)


class Excerpt:
    """Wraps a text to the available width and shows at most `lines` lines; a truncated text ends with `…`.

    Empty lines are omitted, so that more text is visible.

    Example:
        >>> Console(width=10).print(Excerpt("one two three four five six", lines=2))
        one two
        three fo …
    """

    def __init__(self, text: str, style: str = "", *, lines: int = 4) -> None:
        # Enough for any terminal, and avoids wrapping a completion of megabytes.
        kept = (line.rstrip() for line in plain(text.strip()[: lines * 1000]).split("\n"))
        self.text = "\n".join(line for line in kept if line)
        self.style = style
        self.lines = lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        if not self.text:
            yield Text("(only white space)", style="bright_black italic")
            return
        wrapped = list(Text(self.text, style=self.style).wrap(console, options.max_width))
        shown = wrapped[: self.lines]
        if len(wrapped) > self.lines:
            shown[-1].rstrip()
            shown[-1].truncate(max(1, options.max_width - 2))
            shown[-1].append(" …")
        for line in shown:
            line.rstrip()
            line.no_wrap = True
            yield line
