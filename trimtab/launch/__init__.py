"""Starting a run: in this process for now; the same recipe will go to several."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.facts.lazy import lazily

if TYPE_CHECKING:
    from trimtab.launch.device import detect
    from trimtab.launch.here import Finished, Given, View, resume, train
    from trimtab.launch.preparing import Prepared, prepare

_HOMES = {
    "Finished": "here",
    "Given": "here",
    "View": "here",
    "detect": "device",
    "Prepared": "preparing",
    "prepare": "preparing",
    "resume": "here",
    "train": "here",
}

__all__ = ["Finished", "Given", "Prepared", "View", "detect", "prepare", "resume", "train"]

__getattr__ = lazily(__name__, _HOMES)
