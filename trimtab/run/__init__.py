"""The one place that knows all training rooms: it resolves a recipe's choices and puts a run together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.facts.lazy import lazily

if TYPE_CHECKING:
    from trimtab.run.assembling import Run, assemble
    from trimtab.run.choices import Choices
    from trimtab.run.folder import RunFolder
    from trimtab.run.sources import OpenedModel, open_model

_HOMES = {
    "Choices": "choices",
    "OpenedModel": "sources",
    "Run": "assembling",
    "RunFolder": "folder",
    "assemble": "assembling",
    "open_model": "sources",
}

__all__ = ["Choices", "OpenedModel", "Run", "RunFolder", "assemble", "open_model"]

__getattr__ = lazily(__name__, _HOMES)
