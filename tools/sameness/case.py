"""A case: a recipe on the generated inputs, and the actions on its run."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ACTIONS = (
    "generate",
    "evaluate",
    "export",
    "merge",
    "peft",
    "adapters",
    "continue",
    "best",
    "rows",
    "loaded",
)
"""Actions on a case's run, implemented in `actions.py`."""


@dataclass(frozen=True)
class Case:
    """One run of a few optimizer steps.

    Example:
        >>> Case("seed", {"seed": 1}).recipe({"seed": 0, "data": {"train": "@data/x"}}, Path("/w"))
        {'seed': 1, 'data': {'train': '/w/data/x'}}
    """

    name: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the recipe that differ from the base, with dots: `lora.r`. `@` stands for the folder of inputs."""
    then: tuple[str, ...] = ()
    """Of `ACTIONS`."""
    stop_at: int | None = None
    """A callback stops the run after this step, and it is resumed; the stopped folder is kept for the other commit."""
    same_as: str | None = None
    """The uninterrupted case whose values it must equal."""

    def recipe(self, base: Mapping[str, Any], world: Path) -> dict[str, Any]:
        """The full recipe."""
        found = copy.deepcopy(dict(base))
        for key, value in self.keys.items():
            *sections, last = key.split(".")
            place = found
            for section in sections:
                place = place.setdefault(section, {})
            place[last] = copy.deepcopy(value)
        return dict(_located(found, world))


def _located(value: Any, world: Path) -> Any:
    """Replace `@…` by paths in the folder of inputs."""
    if isinstance(value, str) and value.startswith("@"):
        return str(world / value[1:])
    if isinstance(value, dict):
        return {key: _located(one, world) for key, one in value.items()}
    if isinstance(value, list):
        return [_located(one, world) for one in value]
    return value
