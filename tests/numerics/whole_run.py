"""Whole runs of a recipe in this process, and their logs."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiny_model import write_recipe

from trimtab import launch
from trimtab.recipe import load


@dataclass
class Silent:
    """A view that prints nothing and records messages."""

    total_steps: int = 0
    messages: list[str] = field(default_factory=list)

    def plan(self, plan: object) -> None: ...
    def message(self, text: str) -> None:
        self.messages.append(text)

    def progress(self, what: str, done: int, total: int | None, unit: str = "") -> None: ...
    def record(self, record: object) -> None: ...


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Records of one kind, in order."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


def losses(folder: Path) -> list[float]:
    """The training loss of every step."""
    return [record["loss"] for record in records(folder, "train")]


def run(folder: Path, name: str, **changes: object) -> Path:
    """Trains the tiny recipe with changes; returns the run folder."""
    path = write_recipe(
        folder, output_dir=str(folder / name), **{"eval_steps": None, "save_steps": None, **changes}
    )
    finished = launch.train(load(path), Silent())
    assert finished.status == "finished"
    return finished.folder


def relative(ours: list[float], theirs: list[float]) -> float:
    """The largest difference of two curves, relative."""
    assert len(ours) == len(theirs) > 0
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
