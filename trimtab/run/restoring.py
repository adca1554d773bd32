"""Taking a run up again: which checkpoint it continues from, and what its record says beyond or short of it.

A record is cut back only to a checkpoint that is there. A run without one begins again at step 0 only if it never saved
one, which the `checkpoint` records of metrics.jsonl tell.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.checkpoint import Found, Store
from trimtab.facts.errors import CheckpointError
from trimtab.facts.units import format_gaps
from trimtab.recipe import Recipe
from trimtab.run.folder import RunFolder, read_json
from trimtab.trainer import MetricsLog, NoLog
from trimtab.trainer.metrics_log import Cut

SAVED = "checkpoint"
"""Kind of the record that is written when a checkpoint has been published."""
LOGS_CHECKPOINTS = "logs_checkpoints"
"""Key of choices.json: true in runs whose metrics.jsonl has such records from the beginning."""


@dataclass(frozen=True)
class Record:
    """What metrics.jsonl says of a run, as far as it matters for continuing."""

    last_step: int = 0
    """Of the training steps in it."""
    saved_step: int | None = None
    """Of the last checkpoint that was published; None where none was, or where that was not recorded."""
    finished: bool = False
    """Whether a run came to its end."""


def read_record(metrics: Path) -> Record:
    """The record of a run; an empty one where there is no file. Lines that cannot be read are passed over.

    Example:
        >>> read_record(Path("runs/demo/metrics.jsonl")).last_step  # doctest: +SKIP
        100
    """
    last, saved, finished = 0, None, False
    for row in _rows(metrics):
        step = row.get("step")
        if not isinstance(step, int):
            continue
        if row.get("kind") == "train":
            last = max(last, step)
        elif row.get("kind") == SAVED:
            saved = max(saved or 0, step)
        elif row.get("kind") == "memory" and row.get("when") == "after":
            finished = True
    return Record(last, saved, finished)


def find_checkpoint(store: Store, folder: RunFolder, recipe: Recipe) -> Found | None:
    """The last good checkpoint; None where none was ever saved, so that the run begins again at step 0.

    Raises CheckpointError where there are only damaged ones, or where there was one and none is left.
    """
    found = store.latest()
    if found is not None:
        return found
    remedy = f"restore a checkpoint from a copy, or train the recipe again: {folder.anew()}"
    if any(folder.checkpoints.glob("step-*")):
        raise CheckpointError(f"every checkpoint in {folder.checkpoints} is damaged", remedy)
    record = read_record(folder.metrics)
    if not _had_saved(record, recipe, logged=read_json(folder.choices).get(LOGS_CHECKPOINTS) is True):
        return None
    state = "is empty" if folder.checkpoints.is_dir() else "is missing"
    at = record.last_step if record.saved_step is None else record.saved_step
    raise CheckpointError(
        f"{folder.path} trained {record.last_step} steps and saved checkpoints up to step {at}, and "
        f"{folder.checkpoints} {state}: there is nothing to continue from, and metrics.jsonl stays as it is",
        f"{remedy}; or remove {folder.metrics} to begin at step 0 in this folder",
    )


def _had_saved(record: Record, recipe: Recipe, *, logged: bool) -> bool:
    """Whether a run has published a checkpoint. Runs made before that was recorded are judged by their steps."""
    if record.saved_step is not None:
        return True
    if logged:
        return False
    # The second save waits until the first is written.
    return record.finished or (recipe.save_steps is not None and record.last_step > 2 * recipe.save_steps)


def cut_log(
    log: MetricsLog | NoLog, found: Found, folder: RunFolder, on_event: Callable[[str], None]
) -> None:
    """Cuts the log back to a checkpoint and says what is damaged in it or missing from it."""
    before = read_record(folder.metrics)
    cut = log.cut_back(found.step)
    if isinstance(log, NoLog):
        return
    if before.saved_step is not None and before.saved_step > found.step:
        on_event(
            f"the checkpoint of step {before.saved_step} is gone or damaged: steps {found.step + 1} to "
            f"{before.last_step} are trained again, and their records replaced"
        )
    for sentence in flaws(cut, found.step, folder.metrics):
        on_event(sentence)


def flaws(cut: Cut, step: int, metrics: Path) -> list[str]:
    """What is wrong with a log that was cut back to a checkpoint's step, a sentence each; empty if it is whole.

    Example:
        >>> flaws(Cut(steps=frozenset({1, 4})), 4, Path("metrics.jsonl"))
        ['metrics.jsonl lacks steps 2 to 3 of the 4 that were trained: the report will not show them']
    """
    said = []
    if cut.damaged:
        lines = "a damaged line was" if len(cut.damaged) == 1 else f"{len(cut.damaged)} damaged lines were"
        said.append(f"{metrics}: {lines} removed (the first is line {cut.damaged[0]})")
    missing = format_gaps(cut.steps, step)
    if missing and not cut.steps:
        said.append(f"{metrics} is missing or empty: the report will show none of the steps up to {step}")
    elif missing:
        said.append(
            f"{metrics} lacks steps {missing} of the {step} that were trained: the report will not show them"
        )
    return said


def _rows(metrics: Path) -> Iterable[dict[str, Any]]:
    if not metrics.is_file():
        return
    with metrics.open("rb") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                yield row
