"""Reads metrics.jsonl: trained steps, published checkpoints, records. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.run.folder import RunFolder, read_json

CHECKPOINT_KIND = "checkpoint"
"""Kind of the record that is written when a checkpoint is published."""
LOGS_CHECKPOINTS = "logs_checkpoints"
"""Key of choices.json: true in runs whose metrics.jsonl has such records from the first step."""


@dataclass(frozen=True)
class LogSummary:
    """Facts from metrics.jsonl that a resume needs."""

    last_step: int = 0
    """The last logged training step."""
    saved_step: int | None = None
    """Step of the last published checkpoint; None if there was none, or if it was not logged."""
    finished: bool = False
    """Whether the run finished."""


def summarize_log(metrics: Path) -> LogSummary:
    """Summarizes metrics.jsonl; the summary is empty if there is no file. Unreadable lines are skipped.

    Example:
        >>> summarize_log(Path("runs/demo/metrics.jsonl")).last_step  # doctest: +SKIP
        100
    """
    last, saved, finished = 0, None, False
    for row in read_records(metrics):
        step = row.get("step")
        if not isinstance(step, int):
            continue
        if row.get("kind") == "train":
            last = max(last, step)
        elif row.get("kind") == CHECKPOINT_KIND:
            saved = max(saved or 0, step)
        elif row.get("kind") == "memory" and row.get("when") == "after":
            finished = True
    return LogSummary(last, saved, finished)


def has_published(folder: RunFolder, save_steps: int | None) -> bool:
    """Whether a run has published a checkpoint; for runs of versions that did not log this, judged by their steps.

    Example:
        >>> has_published(RunFolder(Path("runs/demo")), 100)  # doctest: +SKIP
        True
    """
    record = summarize_log(folder.metrics)
    if record.saved_step is not None:
        return True
    if read_json(folder.choices).get(LOGS_CHECKPOINTS) is True:
        return False
    # Checkpoints are written in the background, and each save waits for the one before it.
    return record.finished or (save_steps is not None and record.last_step > 2 * save_steps)


def read_records(metrics: Path) -> Iterator[dict[str, Any]]:
    """Every record of a log in order; none if there is no file. Unreadable lines are skipped.

    Example:
        >>> [row["step"] for row in read_records(Path("metrics.jsonl")) if row["kind"] == "eval"]  # doctest: +SKIP
        [0, 100]
    """
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
