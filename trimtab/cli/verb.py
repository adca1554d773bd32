"""The typer app of a command."""

from __future__ import annotations

import typer


def new_app() -> typer.Typer:
    """Returns an app for one command; its docstring is rendered as Markdown in the help."""
    return typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)
