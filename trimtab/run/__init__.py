"""The one place that knows all training rooms: it resolves a recipe's choices and puts a run together."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'trimtab.run' has no attribute {name!r}")
    return getattr(import_module(f"trimtab.run.{_HOMES[name]}"), name)
