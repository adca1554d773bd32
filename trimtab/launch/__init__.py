"""Launches runs in this process; later in several."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.facts.lazy import lazily

if TYPE_CHECKING:
    from trimtab.launch.local import resume, train

_HOMES = {"resume": "local", "train": "local"}

__all__ = ["resume", "train"]

__getattr__ = lazily(__name__, _HOMES)
