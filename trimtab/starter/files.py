"""Paths of the starter's files."""

from __future__ import annotations

import json
from pathlib import Path

from trimtab.facts.errors import DataError, ModelError

HERE = Path(__file__).parent
DATA = ("general", "replay")
RECIPES = ("demo", "pretrain")


def base_folder() -> Path:
    """The base model's Hugging Face folder: config, weights, tokenizer.

    Example:
        >>> base_folder().name
        'base'
    """
    folder = HERE / "base"
    if not (folder / "config.json").is_file():
        raise ModelError("the starter model is not in this installation", "reinstall trimtab")
    return folder


def data_file(name: str) -> Path:
    """A JSON-lines file of texts: `general` (held out) or `replay` (from the pretraining data)."""
    if name not in DATA:
        raise DataError(f"the starter has no text named {name!r}", f"use one of {', '.join(DATA)}")
    return HERE / "data" / f"{name}.jsonl"


def recipe_file(name: str) -> Path:
    """A recipe of the starter: `demo`, or `pretrain`, which trained the base model."""
    if name not in RECIPES:
        raise DataError(f"the starter has no recipe named {name!r}", f"use one of {', '.join(RECIPES)}")
    return HERE / f"{name}.yaml"


def general_text() -> list[str]:
    """The held-out general documents, public-domain pages first.

    Example:
        >>> len(general_text()) > 100
        True
    """
    with data_file("general").open(encoding="utf-8") as file:
        return [json.loads(line)["text"] for line in file]
