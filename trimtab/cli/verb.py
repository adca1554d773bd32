"""What every verb's app has in common."""

from __future__ import annotations

import typer


def new_app() -> typer.Typer:
    """An app for one verb: help is its docstring as Markdown, so that paragraphs flow and commands stand out."""
    return typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)
