"""Launches runs in this process; later in several."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.facts.lazy import lazy_attributes

if TYPE_CHECKING:
    from trimtab.launch.local import resume, train

_MODULES = {"resume": "local", "train": "local"}

__all__ = ["resume", "train"]

__getattr__ = lazy_attributes(__name__, _MODULES)
