"""A recipe meets a machine and a model: every `auto` decided, the plan made. No torch, no data, no weights."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.adapt.targets import EMBEDDING, HEAD
from trimtab.facts.devices import DeviceFacts
from trimtab.facts.errors import RecipeError
from trimtab.facts.shapes import ModelShape
from trimtab.launch.device import detect, threads
from trimtab.model.source import read_shape
from trimtab.plan import Plan, make_plan
from trimtab.plan.limits import settle
from trimtab.plan.make import job_of
from trimtab.recipe import Recipe
from trimtab.run.adapter_tokens import check_same_tokens
from trimtab.run.choices import Choices, choose_all
from trimtab.run.places import model_folder, shape_of
from trimtab.run.recording import choose_graphs
from trimtab.run.replay import check_replay


@dataclass(frozen=True)
class Frozen:
    """What a run folder keeps of its beginning."""

    choices: Choices
    model: Path
    """The folder with the run's own config and tokenizer."""
    commit: str | None
    device: DeviceFacts
    """The device that the run goes on with."""
    memory_changed: bool = False
    """Whether the recipe now asks for other recomputing, or another limit."""
    moved: bool = False
    """Whether the device is another one than it had, so that everything about memory is chosen as for a new run."""


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
        check_same_tokens(recipe, model)
        shape = shape_of(recipe, model)
        check_replay(recipe, model)
        if "max_seq_length" not in recipe.model_fields_set and recipe.max_seq_length > shape.max_positions:
            recipe = recipe.model_copy(update={"max_seq_length": shape.max_positions})
        choices = choose_all(recipe, shape, device, threads())
    else:
        device, model, commit = frozen.device, frozen.model, frozen.commit
        shape, choices = read_shape(model), frozen.choices
        if recipe.num_threads is not None:
            choices = dataclasses.replace(choices, threads=recipe.num_threads)
    said = choices.to_dict()
    said["memory"] = _memory(recipe, frozen, shape, device, said)
    plan = make_plan(recipe, shape, device=device, choices=said)
    _check_rates(plan)
    graphs = choose_graphs(plan)
    plan = dataclasses.replace(plan, choices={**plan.choices, "graphs": graphs})
    choices = dataclasses.replace(choices, memory=said["memory"], graphs=graphs)
    return Prepared(recipe, device, shape, model, commit, choices, plan)


def _check_rates(plan: Plan) -> None:
    """A learning rate of embeddings and head, where neither is trained, would be of nothing."""
    if plan.recipe.embedding_learning_rate is None:
        return
    names = (parameter.name for parameter in plan.job.trained.parameters)
    if not any(name.startswith((f"{EMBEDDING}.", f"{HEAD}.")) for name in names):
        raise RecipeError(
            "embedding_learning_rate is given, and neither embeddings nor head are trained",
            "name embed_tokens or lm_head in lora.modules_to_save, or leave it out",
        )


def unwritten_tokens(prepared: Prepared) -> str | None:
    """What a person should know of tokens that are added to a model whose head is not trained."""
    tokens, parameters = prepared.recipe.model.added_tokens, prepared.plan.job.trained.parameters
    has_head = not prepared.shape.tie_embeddings
    if not tokens or not has_head or any(parameter.name.startswith(f"{HEAD}.") for parameter in parameters):
        return None
    return (
        "model.added_tokens: the model learns to read them and not to write them, as its head is not trained; "
        "name lm_head in lora.modules_to_save as well for both"
    )


def _memory(
    recipe: Recipe, frozen: Frozen | None, shape: ModelShape, device: DeviceFacts, choices: dict[str, Any]
) -> dict[str, Any]:
    """What layers keep: as it was when the run began, or chosen anew where a resume asks for something else.

    The tiles and the loss's chunks stay: they decide in which order sums are rounded.
    """
    if frozen is not None and frozen.moved:
        frozen = None
    kept = frozen.choices.memory if frozen is not None else {}
    if kept and frozen is not None and not frozen.memory_changed:
        return kept
    choices = {**choices, "memory": {"loss_memory": kept["loss_memory"]} if kept else {}}
    tiles = kept["mlp_tiles"] if kept else (1 if frozen is not None else None)
    job = job_of(recipe, shape, device, choices)
    return settle(recipe, job, device, tiles=tiles, fixed_loss=frozen is not None)
