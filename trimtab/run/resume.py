"""Resuming a run: the checkpoint to resume from, truncating its log, and moving to another device.

The log is truncated only to the step of an existing checkpoint. A run without checkpoints restarts at step 0 only if it
never saved one, according to the `checkpoint` records of metrics.jsonl.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from trimtab.checkpoint import SavedCheckpoint, Store
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
from trimtab.run.metrics_summary import has_published, read_records, summarize_log
from trimtab.run.resolve import resolve_backends
from trimtab.trainer import MetricsLog, NoLog
from trimtab.trainer.metrics_log import LogTruncation

DEVICE_KEYS = ("device", *WITH_DEVICE)
"""Keys that are stored if a resume names a device: `device`, and those that may change with it."""
MEMORY_KEYS = ("memory_limit", "recompute", "gradient_checkpointing", "dequantized_layers")
"""If a resume changes one of these, a new memory plan is resolved, which later starts use."""


def first_losses(metrics: Path) -> dict[str, float]:
    """The first logged loss of each evaluation set; empty for a new run.

    Example:
        >>> first_losses(Path("runs/demo/metrics.jsonl"))  # doctest: +SKIP
        {'domain': 2.31}
    """
    found: dict[str, float] = {}
    for row in read_records(metrics):
        if row.get("kind") == "eval" and isinstance(row.get("name"), str):
            with suppress(KeyError, TypeError, ValueError):  # the report counts damaged records
                found.setdefault(row["name"], float(row["loss"]))
    return found


def find_checkpoint(store: Store, folder: RunFolder, recipe: Recipe) -> SavedCheckpoint | None:
    """The last good checkpoint; None if none was ever saved, so that the run restarts at step 0.

    Raises CheckpointError if all checkpoints are damaged, or if there was one and none is left.
    """
    found = store.latest()
    if found is not None:
        return found
    remedy = f"restore a checkpoint from a copy, or train the recipe again: {folder.retrain_command()}"
    if step_folders(folder.checkpoints):
        raise CheckpointError(f"every checkpoint in {folder.checkpoints} is damaged", remedy)
    record = summarize_log(folder.metrics)
    if not has_published(folder, recipe.save_steps):
        return None
    state = "is empty" if folder.checkpoints.is_dir() else "is missing"
    at = record.last_step if record.saved_step is None else record.saved_step
    raise CheckpointError(
        f"{folder.path} trained {record.last_step} steps and saved checkpoints up to step {at}, and "
        f"{folder.checkpoints} {state}: there is nothing to resume from, and metrics.jsonl is left unchanged",
        f"{remedy}; or remove {folder.metrics} to start at step 0 in this folder",
    )


def truncate_log(
    log: MetricsLog | NoLog, found: SavedCheckpoint, folder: RunFolder, on_event: Callable[[str], None]
) -> None:
    """Truncates the log to the step of a checkpoint and reports damaged lines and missing steps."""
    before = summarize_log(folder.metrics)
    cut = log.truncate_after(found.step)
    if isinstance(log, NoLog):
        return
    if before.saved_step is not None and before.saved_step > found.step:
        on_event(
            f"the checkpoint of step {before.saved_step} is missing or damaged: steps {found.step + 1} to "
            f"{before.last_step} are trained again, and their records replaced"
        )
    for sentence in describe_damage(cut, found.step, folder.metrics):
        on_event(sentence)


def describe_damage(cut: LogTruncation, step: int, metrics: Path) -> list[str]:
    """Describes what is missing or damaged in a log that was truncated to a step, a sentence each; empty if nothing.

    Example:
        >>> describe_damage(LogTruncation(steps=frozenset({1, 4})), 4, Path("metrics.jsonl"))
        ['metrics.jsonl lacks steps 2 to 3 of the 4 trained steps: the report will not show them']
    """
    sentences = []
    if cut.damaged:
        lines = "a damaged line was" if len(cut.damaged) == 1 else f"{len(cut.damaged)} damaged lines were"
        sentences.append(f"{metrics}: {lines} removed (the first is line {cut.damaged[0]})")
    missing = format_gaps(cut.steps, step)
    if missing and not cut.steps:
        sentences.append(
            f"{metrics} is missing or empty: the report will show none of the steps up to {step}"
        )
    elif missing:
        what, them = ("step", "it") if missing.isdecimal() else ("steps", "them")
        sentences.append(
            f"{metrics} lacks {what} {missing} of the {step} trained steps: the report will not show {them}"
        )
    return sentences


def requests_device(before: Recipe, recipe: Recipe, overrides: Sequence[str]) -> bool:
    """Whether a resume names a device, even if it is the one in the recipe."""
    named = any(override.partition("=")[0].strip() == "device" for override in overrides)
    return named or recipe.device != before.device


def resume_device(stored: Resolved, recipe: Recipe, run: Path, *, asked: bool) -> DeviceFacts:
    """The device that a run resumes on: the requested one if the resume names one, otherwise the run's own."""
    if asked:
        return detect(recipe.device, recipe.num_threads)
    try:
        return detect(stored.device if recipe.device == "auto" else recipe.device)
    except ResourceError as error:
        import torch

        if torch.cuda.is_available():  # there are GPUs, but not the named one
            raise
        raise ResourceError(
            f"{run} was trained on {stored.device}, and torch sees no CUDA GPU here",
            "`trimtab doctor` explains why; to resume without a GPU: "
            f"`trimtab train --resume {shlex.quote(str(run))} device=cpu`",
        ) from error


def resolve_for_device(stored: Resolved, recipe: Recipe, shape: ModelShape, device: DeviceFacts) -> Resolved:
    """The configuration of a run for a new device: dtypes and adapters are unchanged, backends are resolved for it."""
    if stored.precision.dtype == "bf16" and device.kind == "cuda" and not device.bf16:
        raise ResourceError(
            f"the run computes in bf16, which {device.name} does not support",
            "resume with device=cpu, or on another GPU",
        )
    formats = {
        "dtype": stored.precision.dtype,
        "weights_dtype": stored.precision.weights_dtype,
        "gradient_dtype": stored.precision.gradient_dtype,
    }
    lora = recipe.lora
    if lora is not None and lora.adapter is not None:  # it was resolved when the run began
        lora = type(lora)()
    chosen = resolve_backends(recipe.model_copy(update={**formats, "lora": lora}), shape, device, threads())
    return dataclasses.replace(chosen, lora=stored.lora, deterministic=stored.deterministic)


def with_changes(began: Recipe, recipe: Recipe, keys: Sequence[str]) -> Recipe:
    """The original recipe of a run with these keys of a resume."""
    if not keys:
        return began
    plain = to_dict(began)
    for key in keys:
        section, _, last = key.rpartition(".")
        (plain[section] if section else plain)[last] = getattr(
            getattr(recipe, section) if section else recipe, last
        )
    return build(plain)


def describe_device_change(old: str, new: Resolved) -> str:
    """Describes the effects of another device on a run, in a sentence."""
    return (
        f"device: {old} → {new.device}: backends change (attention: {new.attention.packed_backends}); "
        f"from here on losses are not bitwise identical to those of an uninterrupted run on {old}"
    )


def report_threads(began: int, recipe: Recipe, on_event: Callable[[str], None]) -> None:
    """Tells the user how the number of CPU threads affects a resumed run's losses and speed."""
    if recipe.num_threads not in (None, began):
        on_event(
            f"the run began with {began} CPU thread{'s' if began != 1 else ''} and continues with "
            f"num_threads: {recipe.num_threads}: the order of summation may change, and losses may differ in the "
            "last bits from an uninterrupted run"
        )
    elif began > (os.cpu_count() or 1):
        on_event(
            f"the run began with {began} threads and this machine has {os.cpu_count()} cores: "
            "losses do not change, but steps are slower"
        )
