"""Starting a run: in this process for now; the same recipe will go to several."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.launch.device import detect
    from trimtab.launch.here import Finished, View, resume, train
    from trimtab.launch.preparing import Prepared, prepare

_HOMES = {
    "Finished": "here",
    "View": "here",
    "detect": "device",
    "Prepared": "preparing",
    "prepare": "preparing",
    "resume": "here",
    "train": "here",
}

__all__ = ["Finished", "Prepared", "View", "detect", "prepare", "resume", "train"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'trimtab.launch' has no attribute {name!r}")
    return getattr(import_module(f"trimtab.launch.{_HOMES[name]}"), name)
