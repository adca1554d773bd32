"""A run in this process: prepare, plan, refuse or go, and continue."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from trimtab.facts.devices import DeviceFacts
from trimtab.facts.shapes import ModelShape
from trimtab.launch.device import detect
from trimtab.plan import Plan, check_disk, check_fits, make_plan
from trimtab.recipe import Recipe, check_resume, dump, load, to_dict
from trimtab.run import assembling, corpora, sources
from trimtab.run.choices import Choices, choose_all
from trimtab.run.environment import environment
from trimtab.run.folder import RunFolder, read_json, write_json, write_text


class View(Protocol):
    """Whoever watches a run: `report.LiveView`, or a test."""

    total_steps: int

    def plan(self, plan: dict[str, Any]) -> None: ...
    def message(self, text: str) -> None: ...
    def working(self, what: str, done: int, total: int | None, unit: str = "") -> None: ...
    def record(self, record: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Prepared:
    """A recipe that met a machine and a model, before any data is read."""

    recipe: Recipe
    device: DeviceFacts
    shape: ModelShape
    weights: Path
    """Folder or GGUF file of the pretrained weights."""
    commit: str | None
    choices: Choices
    plan: Plan


@dataclass(frozen=True)
class Finished:
    """How a run ended and where it lies."""

    folder: Path
    status: str
    step: int
    signal: int | None = None


def prepare(recipe: Recipe, frozen: dict[str, Any] | None = None) -> Prepared:
    """Finds the model, decides every `auto` (or takes `frozen` ones of a run folder) and makes the plan."""
    device = detect(recipe.device if frozen is None else frozen["device"])
    revision = recipe.model.revision if frozen is None else frozen["model_commit"] or recipe.model.revision
    weights, commit = sources.model_folder(recipe.model.name, revision=revision)
    shape = sources.read_shape(weights)
    if frozen is None:
        choices = choose_all(recipe, shape, device, torch.get_num_threads())
    else:
        choices = Choices.from_dict(frozen)
    plan = make_plan(recipe, shape, device=device, choices=choices.to_dict())
    return Prepared(recipe, device, shape, weights, commit, choices, plan)


def train(recipe: Recipe, view: View, *, after_step: Callable[[int], None] | None = None) -> Finished:
    """A new run of a recipe, from plan to the last checkpoint.

    Example:
        >>> train(load("recipe.yaml"), LiveView())  # doctest: +SKIP
        Finished(folder=PosixPath('runs/train'), status='finished', step=100, signal=None)
    """
    folder = RunFolder(Path(recipe.output_dir))
    prepared = prepare(recipe)
    check_fits(prepared.plan, prepared.device)
    folder.create()
    with folder.lock():
        return _go(prepared, folder, view, kept=None, after_step=after_step)


def resume(
    path: Path,
    overrides: Sequence[str],
    view: View,
    *,
    after_step: Callable[[int], None] | None = None,
) -> Finished:
    """Continues a run folder from its last good checkpoint, with the choices it began with."""
    folder = RunFolder(path)
    folder.open()
    with folder.lock():
        old = load(folder.recipe)
        recipe = load(folder.recipe, overrides)
        check_resume(old, recipe)
        kept = read_json(folder.choices)
        if kept["threads"] > (os.cpu_count() or 1):
            view.message(
                f"the run began with {kept['threads']} threads and this machine has {os.cpu_count()} cores: "
                "sums are added in the same order all the same, only slower"
            )
        if kept["deterministic"] is False and kept["device"] == "cuda":
            view.message(
                "deterministic is off: on a GPU losses may differ in the last bits from an unstopped run"
            )
        return _go(prepare(recipe, frozen=kept), folder, view, kept=kept, after_step=after_step)


def _go(
    prepared: Prepared,
    folder: RunFolder,
    view: View,
    *,
    kept: dict[str, Any] | None,
    after_step: Callable[[int], None] | None,
) -> Finished:
    recipe, choices, shape = prepared.recipe, prepared.choices, prepared.shape
    tokenizer = sources.load_tokenizer(prepared.weights, shape, recipe.model.tokenizer)
    opened = corpora.open_corpora(recipe, tokenizer, view, kept=kept and kept["data"])
    plan = make_plan(
        recipe, shape, device=prepared.device, data=opened.facts(recipe), choices=choices.to_dict()
    )
    if kept is None:
        check_disk(plan.disk, shutil.disk_usage(folder.path).free, str(folder.path))
        sources.save_skeleton(prepared.weights, shape, tokenizer, folder.model, choices.weights_dtype)
        write_text(folder.recipe, dump(recipe))
        write_json(folder.plan, plan.to_dict())
        write_json(folder.environment, environment(torch.device(choices.device)))
        # Last: a folder with choices.json is a run that can be continued.
        write_json(
            folder.choices,
            {**choices.to_dict(), "model_commit": prepared.commit, "data": opened.pins()},
        )
    view.plan(plan.to_dict())
    for note in plan.notes:
        view.message(note)
    run = assembling.assemble(
        recipe,
        choices,
        shape,
        weights=prepared.weights,
        tokenizer=tokenizer,
        corpora=opened,
        folder=folder,
        observers=[view, *assembling.trackers(recipe, folder, to_dict(recipe))],
        on_event=view.message,
        resume=kept is not None,
    )
    run.job.after_step = after_step
    view.total_steps = run.job.cadence.total_steps
    outcome = run.train()
    return Finished(folder.path, outcome.status, outcome.state.step, outcome.signal)
