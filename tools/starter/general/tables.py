"""Reads the word lists and templates from the TOML files next to the code."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any


def read(name: str) -> dict[str, Any]:
    """The content of `NAME.toml` in this folder.

    Example:
        >>> "dog" in read("words")["pets"]
        True
    """
    with (Path(__file__).parent / f"{name}.toml").open("rb") as file:
        return tomllib.load(file)


def rows(table: list[list[str]]) -> tuple[tuple[str, ...], ...]:
    """Rows as tuples."""
    return tuple(tuple(row) for row in table)
