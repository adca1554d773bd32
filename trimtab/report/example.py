"""Shows a training example with its trained tokens in colour, or in brackets without colour."""

from __future__ import annotations

from typing import Any

from rich.console import Console, RenderableType
from rich.panel import Panel
from rich.text import Text

from trimtab.report.plain import as_text, plain
from trimtab.report.plan_panel import MAX_WIDTH

TRAINED, OTHER = "bold green", "bright_black"
OPEN, CLOSE = "⟦", "⟧"
MAX_SPAN_CHARS = {True: 600, False: 300}
"""Maximum characters of a trained and an untrained span; longer spans are shortened in the middle."""
MAX_EXAMPLE_CHARS = 3000
"""Maximum characters shown of an example."""


def example_view(record: dict[str, Any], console: Console) -> RenderableType:
    """Returns the example as a coloured panel, or without colour as text with the trained spans in brackets.

    Args:
        record: `origin`, `tokens`, `trained`, `cut` and `runs`, as returned by `trimtab.data.highlight_example`.
        console: the console on which it will be printed.
    """
    coloured = console.is_terminal and console.color_system is not None and not console.no_color
    counted = f"{record['trained']} of {record['tokens']} tokens"
    origin = plain(str(record["origin"]), keep_newlines=False)
    body = _body(record, coloured)
    if not coloured:
        head = f"trained tokens of {origin} ({counted}), between {OPEN} and {CLOSE}:\n"
        return Text(head).append_text(body)
    title = as_text(f"trained tokens: {origin}, {counted} (in green)", "bold", keep_newlines=False)
    return Panel(
        body,
        title=title,
        title_align="left",
        width=min(console.width, MAX_WIDTH),
        border_style="bright_black",
    )


def shown_spans(record: dict[str, Any]) -> list[tuple[str, bool]]:
    """Returns an example's spans as (text, whether trained), with long spans shortened and a long example truncated."""
    shown: list[tuple[str, bool]] = []
    for text, trained in record["runs"]:
        if sum(len(span) for span, _ in shown) > MAX_EXAMPLE_CHARS:
            shown.append((" …", False))
            break
        shown.append((_shortened(text, MAX_SPAN_CHARS[bool(trained)]), bool(trained)))
    if shown and not shown[-1][1]:
        shown[-1] = (shown[-1][0].rstrip(), False)
    if record["cut"]:
        shown.append((" … (truncated here: max_seq_length)", False))
    return shown


def _body(record: dict[str, Any], coloured: bool) -> Text:
    body = Text()
    for text, trained in shown_spans(record):
        shown = plain(text)
        if trained and not coloured:
            shown = f"{OPEN}{shown}{CLOSE}"
        body.append(shown, TRAINED if trained else OTHER)
    return body


def _shortened(text: str, most: int) -> str:
    """Removes the middle of a long text.

    Example:
        >>> _shortened("abcdefghij", 4)
        'ab … ij'
    """
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-(most // 2) :]}"
