"""A run folder: what lies where, and how its small files are written so that none is ever half there."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.checkpoint import RunLock
from trimtab.facts.errors import CheckpointError, ResourceError

OURS = (
    RunLock.NAME,
    "recipe.yaml",
    "plan.json",
    "choices.json",
    "environment.json",
    "metrics.jsonl",
    "model",
    "start",
    "checkpoints",
    "tensorboard",
    "wandb",
)
"""All that a run folder has before its first step."""
LATER = ("receipts", "report.html", ".demo")
"""What a run, or a demo, adds to it."""
_ON_THE_WAY = re.compile(r"\.[a-z]+\.(yaml|json|html)\.tmp-\d+")
"""Names of files whose writer was killed before they got their own."""


@dataclass(frozen=True)
class RunFolder:
    """Paths inside a run folder.

    Example:
        >>> RunFolder(Path("runs/a")).metrics.name
        'metrics.jsonl'
    """

    path: Path

    @property
    def recipe(self) -> Path:
        """The resolved recipe."""
        return self.path / "recipe.yaml"

    @property
    def plan(self) -> Path:
        """What the run was expected to take."""
        return self.path / "plan.json"

    @property
    def choices(self) -> Path:
        """Every `auto` of the recipe as it was decided at the first start."""
        return self.path / "choices.json"

    @property
    def environment(self) -> Path:
        """Versions and machine."""
        return self.path / "environment.json"

    @property
    def metrics(self) -> Path:
        """One JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """`step-…` folders."""
        return self.path / "checkpoints"

    @property
    def model(self) -> Path:
        """config.json and the tokenizer: with a checkpoint, all that is needed to use the model."""
        return self.path / "model"

    @property
    def receipts(self) -> Path:
        """Proofs of exports."""
        return self.path / "receipts"

    @property
    def report(self) -> Path:
        """The one-page report."""
        return self.path / "report.html"

    @staticmethod
    def is_run(path: Path) -> bool:
        """Whether a folder is one of ours."""
        return (path / "recipe.yaml").is_file() and (path / "choices.json").is_file()

    def began(self) -> bool:
        """Whether anything was learnt here: a checkpoint, or a logged step."""
        if any(self.checkpoints.glob("step-*")):
            return True
        if not self.metrics.is_file():
            return False
        with self.metrics.open("rb") as lines:
            return any(b'"kind": "train"' in line for line in lines)

    def check_new(self) -> None:
        """Refuses a folder that a new run would spoil: one with a run, or with anything that is not ours."""
        if self.began():
            raise CheckpointError(
                f"{self.path} already holds a run",
                f"continue it with `trimtab train --resume {self.path}`, or give another output_dir",
            )
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path} is a file, not a folder", "give another output_dir")
        found = sorted(p.name for p in self.path.iterdir())
        foreign = [name for name in found if not _is_ours(name)]
        if foreign or (found and RunLock.NAME not in found):
            raise CheckpointError(
                f"{self.path} is not empty ({(foreign or found)[0]} is in it)", "give another output_dir"
            )

    @contextmanager
    def create(self) -> Iterator[None]:
        """Makes and locks the folder of a new run; what never finished a step is taken away again.

        So a start that fails, on bad weights or an empty file, leaves nothing that stands in the next one's way. From
        the first step on there is something to keep: the loop saves before any error leaves it.
        """
        existed = self.path.exists()
        with self.lock():
            self.check_new()
            self._clear()
            try:
                yield
            finally:
                if not self.began():
                    self._clear()
                    if not existed and [p.name for p in self.path.iterdir()] == [RunLock.NAME]:
                        (self.path / RunLock.NAME).unlink()
                        self.path.rmdir()

    def foreign(self) -> list[str]:
        """Names in the folder that no run writes."""
        names = sorted(path.name for path in self.path.iterdir())
        return [name for name in names if not _is_ours(name) and name not in LATER]

    def clear(self) -> None:
        """Removes a whole run, finished or not, the lock excepted; whoever calls holds it."""
        assert not self.foreign(), self.foreign()
        self._clear(LATER)

    def _clear(self, more: tuple[str, ...] = ()) -> None:
        """Removes what a run writes before its first step, and `more`, the lock excepted."""
        for path in self.path.iterdir():
            if path.name == RunLock.NAME or not (_is_ours(path.name) or path.name in more):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def lock(self) -> RunLock:
        """One process at a time: `with folder.lock():`."""
        return RunLock(self.path)

    def open(self) -> None:
        """Checks that this is a run that can be continued."""
        if not self.path.is_dir():
            raise CheckpointError(
                f"there is no folder {self.path}", "give the run folder that training printed"
            )
        if not self.is_run(self.path):
            raise CheckpointError(
                f"{self.path} is not a run folder (no recipe.yaml and choices.json in it)",
                "give the run folder that training printed",
            )


def _is_ours(name: str) -> bool:
    return name in OURS or _ON_THE_WAY.fullmatch(name) is not None


def write_text(path: Path, text: str) -> None:
    """Writes a small file so that a reader sees the old one or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise ResourceError(
            f"{path} cannot be written: {error.strerror}", "free some space or check rights"
        ) from error


def write_json(path: Path, data: dict[str, Any]) -> None:
    """`write_text` of readable JSON, its keys in their order."""
    write_text(path, json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of ours; damage is said plainly."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}", "restore it or start the run anew"
        ) from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} does not hold a JSON object", "restore it or start the run anew")
    return data
