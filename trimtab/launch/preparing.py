"""A recipe meets a machine and a model: every `auto` decided, the plan made. No torch, no data, no weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trimtab.facts.devices import DeviceFacts
from trimtab.facts.shapes import ModelShape
from trimtab.launch.device import detect, threads
from trimtab.model.source import read_shape
from trimtab.plan import Plan, make_plan
from trimtab.recipe import Recipe
from trimtab.run.choices import Choices, choose_all
from trimtab.run.places import model_folder, shape_of


@dataclass(frozen=True)
class Frozen:
    """What a run folder keeps of its beginning."""

    choices: Choices
    model: Path
    """The folder with the run's own config and tokenizer."""
    commit: str | None


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


def prepare(recipe: Recipe, frozen: Frozen | None = None) -> Prepared:
    """Finds the model, decides every `auto` and makes the plan.

    Of a hub id only config and tokenizer are fetched here, so that a run that does not fit costs no download. A run
    that is continued has both in its folder (`frozen`), with what was decided when it began.
    """
    if frozen is None:
        device = detect(recipe.device)
        model, commit = model_folder(recipe.model.name, revision=recipe.model.revision, weights=False)
        shape = shape_of(recipe, model)
        choices = choose_all(recipe, shape, device, threads())
    else:
        device, model, commit = detect(frozen.choices.device), frozen.model, frozen.commit
        shape, choices = read_shape(model), frozen.choices
    plan = make_plan(recipe, shape, device=device, choices=choices.to_dict())
    return Prepared(recipe, device, shape, model, commit, choices, plan)
