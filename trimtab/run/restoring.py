"""Taking a run up again: which checkpoint it continues from, and what its record says beyond or short of it.

A record is cut back only to a checkpoint that is there. A run without one begins again at step 0 only if it never saved
one, which the `checkpoint` records of metrics.jsonl tell.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from trimtab.checkpoint import Found, Store
from trimtab.checkpoint.folder import step_folders
from trimtab.facts.errors import CheckpointError
from trimtab.facts.units import format_gaps
from trimtab.recipe import Recipe
from trimtab.run.folder import RunFolder
from trimtab.run.record import had_saved, read_record, rows
from trimtab.trainer import MetricsLog, NoLog
from trimtab.trainer.metrics_log import Cut


def first_losses(metrics: Path) -> dict[str, float]:
    """The first loss of each evaluated set that a run's log has; empty for a new run.

    Example:
        >>> first_losses(Path("runs/demo/metrics.jsonl"))  # doctest: +SKIP
        {'domain': 2.31}
    """
    found: dict[str, float] = {}
    for row in rows(metrics):
        if row.get("kind") == "eval" and isinstance(row.get("name"), str):
            with suppress(KeyError, TypeError, ValueError):  # a damaged record, which the report counts
                found.setdefault(row["name"], float(row["loss"]))
    return found


def find_checkpoint(store: Store, folder: RunFolder, recipe: Recipe) -> Found | None:
    """The last good checkpoint; None where none was ever saved, so that the run begins again at step 0.

    Raises CheckpointError where there are only damaged ones, or where there was one and none is left.
    """
    found = store.latest()
    if found is not None:
        return found
    remedy = f"restore a checkpoint from a copy, or train the recipe again: {folder.anew()}"
    if step_folders(folder.checkpoints):
        raise CheckpointError(f"every checkpoint in {folder.checkpoints} is damaged", remedy)
    record = read_record(folder.metrics)
    if not had_saved(folder, recipe.save_steps):
        return None
    state = "is empty" if folder.checkpoints.is_dir() else "is missing"
    at = record.last_step if record.saved_step is None else record.saved_step
    raise CheckpointError(
        f"{folder.path} trained {record.last_step} steps and saved checkpoints up to step {at}, and "
        f"{folder.checkpoints} {state}: there is nothing to continue from, and metrics.jsonl stays as it is",
        f"{remedy}; or remove {folder.metrics} to begin at step 0 in this folder",
    )


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
