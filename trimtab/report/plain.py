"""Text from data, models and files, made safe to print: no control characters, no markup."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator

from rich.console import Console, ConsoleOptions
from rich.text import Text

# Format characters (Cf) can reorder or hide what follows; a few are ordinary in real scripts and emoji.
KEPT_FORMAT = {"\u200c", "\u200d", "\u00ad"}
# Control, surrogate, line separator, paragraph separator: they move the cursor or cannot be encoded.
SHOWN_CATEGORIES = {"Cc", "Cs", "Zl", "Zp"}


def plain(text: str, *, keep_newlines: bool = True) -> str:
    """The text with control and reordering characters shown as visible escapes.

    Example:
        >>> plain("a\\x1b[31mb")
        'a\\\\x1b[31mb'
    """
    if text.isascii() and text.isprintable():  # most text; the loop below costs 0.2 µs a character
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
    """`plain` as a rich Text, in which brackets are brackets and never markup."""
    return Text(plain(text, keep_newlines=keep_newlines), style=style)


class Excerpt:
    """Text of any length as at most `lines` lines of whatever width there is; what is cut ends with `…`.

    Empty lines are left out: here they would only push text off the screen.

    Example:
        >>> Console(width=10).print(Excerpt("one two three four five six", lines=2))
        one two
        three fo …
    """

    def __init__(self, text: str, style: str = "", *, lines: int = 4) -> None:
        # Enough for any terminal, and a completion of megabytes is not wrapped whole.
        kept = (line.rstrip() for line in plain(text.strip()[: lines * 1000]).split("\n"))
        self.text = "\n".join(line for line in kept if line)
        self.style = style
        self.lines = lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        if not self.text:
            yield Text("(nothing but white space)", style="bright_black italic")
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
