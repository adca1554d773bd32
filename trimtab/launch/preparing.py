"""A recipe meets a machine and a model: every `auto` decided, the plan made. No torch, no data, no weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.facts.devices import DeviceFacts
from trimtab.facts.errors import CheckpointError
from trimtab.facts.shapes import ModelShape
from trimtab.launch.device import detect, threads
from trimtab.model.source import read_shape
from trimtab.plan import Plan, make_plan
from trimtab.recipe import Recipe
from trimtab.run.choices import Choices, choose_all
from trimtab.run.places import model_folder


@dataclass(frozen=True)
class Prepared:
    """A recipe that met a machine and a model, before any data is read."""

    recipe: Recipe
    device: DeviceFacts
    shape: ModelShape
    model: Path
    """Folder or GGUF file with config and tokenizer."""
    commit: str | None
    choices: Choices
    plan: Plan


def prepare(recipe: Recipe, frozen: dict[str, Any] | None = None) -> Prepared:
    """Finds the model, decides every `auto` (or takes `frozen` ones of a run folder) and makes the plan.

    Of a hub id only config and tokenizer are fetched here, so that a run that does not fit costs no download.
    """
    device = detect(recipe.device if frozen is None else frozen["device"])
    revision = recipe.model.revision if frozen is None else frozen["model_commit"] or recipe.model.revision
    model, commit = model_folder(recipe.model.name, revision=revision, weights=False)
    if frozen is not None and commit != frozen["model_commit"]:
        raise CheckpointError(
            f"model {recipe.model.name} is not what the run began with "
            f"({commit or 'a local folder'} instead of {frozen['model_commit'] or 'a local folder'})",
            "continue from the folder where the run was started",
        )
    shape = read_shape(model)
    if frozen is None:
        choices = choose_all(recipe, shape, device, threads())
    else:
        choices = Choices.from_dict(frozen)
    plan = make_plan(recipe, shape, device=device, choices=choices.to_dict())
    return Prepared(recipe, device, shape, model, commit, choices, plan)
