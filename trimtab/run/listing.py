"""Lists run folders: state, trained steps, loss and disk space of each run. No torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from trimtab.checkpoint.layout import WRITER_LOCK, list_checkpoints, step_folders
from trimtab.checkpoint.lock import RunLock, is_locked
from trimtab.facts.errors import CheckpointError, RecipeError
from trimtab.facts.names import path_of
from trimtab.run.choices import find_damage
from trimtab.run.folder import RunFolder, read_json

State = Literal[
    "running", "finished", "stopped early", "stopped", "interrupted", "failed", "not begun", "damaged"
]
DEPTH = 3
"""Depth of nested folders that are searched: runs/project/run."""
LOCKS = (RunLock.NAME, WRITER_LOCK)
TAIL_BYTES = 1 << 18
"""Bytes that are read from the end of metrics.jsonl: its last records."""


@dataclass(frozen=True)
class RunSummary:
    """One run folder.

    Example:
        >>> [(run.name, run.state, run.step) for run in trimtab.runs("runs")]  # doctest: +SKIP
        [('demo', 'finished', 300)]
    """

    path: Path
    state: State
    """`running`: a process has its lock. `finished`: all steps are trained and saved. `stopped early`: early stopping
    ended it. `stopped`: a callback ended it. `failed`: its loss was not finite. `interrupted`: a signal, a kill or an
    error ended it before its last step; resuming continues it. `not begun`: its start was interrupted before the first
    step; resuming starts it. `damaged`: it can be resumed only after a repair; see `problem`."""
    step: int
    """Number of trained steps, from the log and the newest checkpoint."""
    total_steps: int | None
    loss: float | None
    """Training loss of the last step; None if it was not logged."""
    checkpoint: int | None
    """Step of the newest good checkpoint."""
    size_bytes: int
    updated: float
    """When training last wrote something, in seconds since the epoch."""
    problem: str | None = None
    """What is damaged. A run with only a damaged log can be resumed and keeps its state."""

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.name

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {**asdict(self), "path": str(self.path)}


def runs(folder: str | Path = "runs") -> list[RunSummary]:
    """The runs in a folder, the most recently trained first; a list of one for a run folder.

    Example:
        >>> trimtab.runs("runs")[0].state  # doctest: +SKIP
        'finished'
    """
    if not isinstance(folder, str | os.PathLike):
        raise RecipeError(
            f"folder is {folder!r}, not a path", 'give the path of a folder with runs in it, such as "runs"'
        )
    root = path_of(folder, "folder")
    if not root.is_dir():
        what = "is a file" if root.exists() else "does not exist"
        raise CheckpointError(f"{root} {what}", "give a folder with run folders in it, or a run folder")
    found = [summarize(path) for path in _run_folders(root, DEPTH)]
    return sorted(found, key=lambda run: run.updated, reverse=True)


def summarize(path: Path) -> RunSummary:
    """Summarizes a run folder from its small files; checkpoints are checked by manifest and file sizes."""
    run = RunFolder(path)
    size, updated = _measure(path)
    train, end = _tail(run.metrics)
    checkpoint, damage = _newest(run)
    problem = damage or _problem(run, train)
    total = None
    try:
        total = _count(read_json(run.plan).get("data", {}).get("steps")) if run.plan.is_file() else None
    except (CheckpointError, AttributeError):
        problem = problem or "plan.json cannot be read"
    recorded = train.get("step", 0)
    step = max(recorded, checkpoint or 0)
    state = _state(run, problem, end if checkpoint is not None and checkpoint >= step else None, step, total)
    if recorded < step and state not in ("running", "damaged"):
        problem = _incomplete(run.metrics, recorded)
        # The record of its end is missing too, but only a run that trained all steps has a checkpoint of the last.
        state = "finished" if step == total else state
    loss = train.get("loss") if recorded == step else None
    return RunSummary(
        path=path,
        state=state,
        step=step,
        total_steps=total,
        loss=float(loss) if isinstance(loss, int | float | str) else None,
        checkpoint=checkpoint,
        size_bytes=size,
        updated=updated,
        problem=problem,
    )


def _incomplete(metrics: Path, recorded: int) -> str:
    """Describes the damage of a log that ends before the newest checkpoint."""
    if not metrics.is_file():
        return f"{metrics.name} is {'a folder' if metrics.is_dir() else 'missing'}"
    return f"{metrics.name} is damaged: it ends after step {recorded}"


def _state(run: RunFolder, problem: str | None, end: State | None, step: int, total: int | None) -> State:
    """The state of a run with a log that ends in state `end`.

    A run that was extended has the record of its first end, and fewer trained steps than its new total.
    """
    if is_locked(run.path / RunLock.NAME):
        return "running"
    if problem is not None:
        return "damaged"
    if end is not None and (end != "finished" or total is None or step >= total):
        return end
    return "interrupted" if run.choices.is_file() and run.began() else "not begun"


def _run_folders(root: Path, depth: int) -> Iterator[Path]:
    run = RunFolder(root)
    # A user's own recipe.yaml does not make a run folder; every run has a lock file next to it.
    if run.choices.is_file() or (run.recipe.is_file() and (root / RunLock.NAME).is_file()):
        yield root
    elif depth > 0:
        for path in sorted(root.iterdir()):
            if path.is_dir() and not path.is_symlink() and not path.name.startswith("."):
                yield from _run_folders(path, depth - 1)


def _problem(run: RunFolder, train: dict[str, Any]) -> str | None:
    """The obstacle to resuming a run, as far as its small files show it; None if there is none."""
    try:
        if run.choices.is_file():
            wrong = find_damage(read_json(run.choices))
            if wrong is not None:
                return f"choices.json {wrong}"
        elif run.began():
            return "choices.json is missing"
    except CheckpointError:
        return "choices.json cannot be read"
    if not step_folders(run.checkpoints) and _has_saved(run.metrics):
        return "its checkpoints are missing"
    return None


def _newest(run: RunFolder) -> tuple[int | None, str | None]:
    """(step of the newest good checkpoint, the problem if there are only damaged ones)."""
    try:
        good = list_checkpoints(run.checkpoints)
    except CheckpointError as error:
        return None, error.cause
    if good:
        return good[0][1].step, None
    return None, "every checkpoint is damaged" if step_folders(run.checkpoints) else None


def _has_saved(metrics: Path) -> bool:
    if not metrics.is_file():
        return False
    with metrics.open("rb") as lines:
        return any(b'"kind": "checkpoint"' in line for line in lines)


def _tail(metrics: Path) -> tuple[dict[str, Any], State | None]:
    """(the last training record, the state in which the run ended after it, if that was logged)."""
    if not metrics.is_file():
        return {}, None
    with metrics.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - TAIL_BYTES))
        tail = file.read()
        if (
            size > TAIL_BYTES and b'"kind": "train"' not in tail
        ):  # evaluation records of many documents follow it
            file.seek(0)
            tail = file.read()
    train: dict[str, Any] = {}
    end: State | None = None
    for line in tail.splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            continue
        if row.get("kind") == "train":
            train, end = row, None
        elif row.get("kind") == "memory" and row.get("when") == "after":
            end = end or "finished"
        elif row.get("kind") == "event":
            end = _end_of(str(row.get("message"))) or end
    return train, end


def _end_of(message: str) -> State | None:
    """The state in which a run ended, from the events that the training loop logs (`trainer/loop.py`)."""
    ends: dict[str, State] = {
        "stopped early at step ": "stopped early",
        "stopped by a callback": "stopped",
        "not finite at step ": "failed",
    }
    return next((state for begin, state in ends.items() if message.startswith(begin)), None)


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _measure(path: Path) -> tuple[int, float]:
    """(size of all files, when training last wrote one); files that are deleted during the scan are skipped.

    Writes of locks, the report and receipts do not count as training: other commands write them too.
    """
    run, size, updated = RunFolder(path), 0, 0.0
    for folder, _, names in os.walk(path):
        for name in names:
            try:
                stat = os.lstat(os.path.join(folder, name))
            except OSError:
                continue
            size += stat.st_size
            if name not in LOCKS and name != run.report.name and Path(folder) != run.receipts:
                updated = max(updated, stat.st_mtime)
    return size, updated or path.stat().st_mtime
