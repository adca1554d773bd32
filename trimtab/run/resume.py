"""A run that is taken up again: the checkpoint it continues from, its record, and another device.

A record is cut back only to a checkpoint that is there. A run without one begins again at step 0 only if it never saved
one, which the `checkpoint` records of metrics.jsonl tell.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from trimtab.checkpoint import Found, Store
from trimtab.checkpoint.layout import step_folders
from trimtab.facts.devices import DeviceFacts
from trimtab.facts.errors import CheckpointError, ResourceError
from trimtab.facts.shapes import ModelShape
from trimtab.facts.units import format_gaps
from trimtab.plan.resolved import Resolved
from trimtab.recipe import Recipe, build, to_dict
from trimtab.recipe.resume import WITH_DEVICE
from trimtab.run.device import detect, threads
from trimtab.run.folder import RunFolder
from trimtab.run.record import had_saved, read_record, rows
from trimtab.run.resolve import resolve_backends
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
        what, them = ("step", "it") if missing.isdecimal() else ("steps", "them")
        said.append(
            f"{metrics} lacks {what} {missing} of the {step} that were trained: the report will not show {them}"
        )
    return said


def asks_for_device(before: Recipe, recipe: Recipe, overrides: Sequence[str]) -> bool:
    """Whether a resume names a device, also where it is the word that the recipe has already."""
    named = any(override.partition("=")[0].strip() == "device" for override in overrides)
    return named or recipe.device != before.device


def resume_device(kept: Resolved, recipe: Recipe, run: Path, *, asked: bool) -> DeviceFacts:
    """The device that a run goes on with: the one that the resume asks for, otherwise the one it has."""
    if asked:
        return detect(recipe.device)
    try:
        return detect(kept.device if recipe.device == "auto" else recipe.device)
    except ResourceError as error:
        import torch

        if torch.cuda.is_available():  # not the one that is named
            raise
        raise ResourceError(
            f"{run} was trained on {kept.device}, and torch sees no CUDA GPU here",
            "`trimtab doctor` says why; to go on without one: "
            f"`trimtab train --resume {shlex.quote(str(run))} device=cpu`",
        ) from error


def resolve_for_device(kept: Resolved, recipe: Recipe, shape: ModelShape, device: DeviceFacts) -> Resolved:
    """The configuration of a run for another device: formats and adapters stay, implementations are chosen anew."""
    if kept.precision.dtype == "bf16" and device.kind == "cuda" and not device.bf16:
        raise ResourceError(
            f"the run computes in bf16, which {device.name} does not", "go on with device=cpu, or another GPU"
        )
    formats = {
        "dtype": kept.precision.dtype,
        "weights_dtype": kept.precision.weights_dtype,
        "gradient_dtype": kept.precision.gradient_dtype,
    }
    lora = recipe.lora
    if lora is not None and lora.adapter is not None:  # what it brought was resolved when the run began
        lora = type(lora)()
    chosen = resolve_backends(recipe.model_copy(update={**formats, "lora": lora}), shape, device, threads())
    return dataclasses.replace(chosen, lora=kept.lora, deterministic=kept.deterministic)


def with_device(began: Recipe, recipe: Recipe) -> Recipe:
    """The recipe that a run began with, naming the device, and what may change with it, as a resume does."""
    plain = to_dict(began)
    for key in ("device", *WITH_DEVICE):
        section, _, last = key.rpartition(".")
        (plain[section] if section else plain)[last] = getattr(
            getattr(recipe, section) if section else recipe, last
        )
    return build(plain)


def describe_move(old: str, new: Resolved) -> str:
    """What another device means for a run, in a sentence."""
    return (
        f"device: {old} → {new.device}: implementations are chosen anew (attention: "
        f"{new.attention.packed_backends}); from here on losses are not bit-equal to those of an unstopped run on {old}"
    )


def tell_threads(began: int, recipe: Recipe, on_event: Callable[[str], None]) -> None:
    """What a resumed run's number of CPU threads means for its bits and its speed."""
    if recipe.num_threads not in (None, began):
        on_event(
            f"the run began with {began} CPU thread{'s' if began != 1 else ''} and continues with "
            f"num_threads: {recipe.num_threads}: sums may be added up in another order, so losses may differ in the "
            "last bits from an uninterrupted run"
        )
    elif began > (os.cpu_count() or 1):
        on_event(
            f"the run began with {began} threads and this machine has {os.cpu_count()} cores: "
            "sums are added in the same order all the same, only slower"
        )
