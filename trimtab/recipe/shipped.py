"""Recipes that ship with trimtab and are given by name: `trimtab train own-text data.train=./my-texts`."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parents[1]


def shipped_recipes() -> dict[str, Path]:
    """Returns the shipped recipes, name to file: inside an installed package, or next to the package in a clone.

    Example:
        >>> "own-text" in shipped_recipes(), "qwen3-8b-qlora" in shipped_recipes()
        (True, True)
    """
    inside = PACKAGE / "recipes"
    folder = inside if inside.is_dir() else PACKAGE.parent / "recipes"
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}
