"""Prepares a run: finds the model, resolves every `auto` and makes the plan. No torch, no data, no weights."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from trimtab import text
from trimtab.adapt.targets import EMBEDDING, HEAD
from trimtab.facts.devices import DeviceFacts, host_cores
from trimtab.facts.errors import RecipeError
from trimtab.facts.shapes import ModelShape
from trimtab.model.source import read_shape, unknown_config_keys
from trimtab.plan import Plan, make_plan
from trimtab.plan.resolved import Resolved
from trimtab.recipe import Recipe
from trimtab.run.adapter_tokens import check_same_tokens, unknown_tokens
from trimtab.run.device import detect, threads
from trimtab.run.locate import STARTER, model_folder, shape_of, tokenizer_of
from trimtab.run.resolve import resolve_graphs, resolve_memory, resolve_memory_on_resume, resolve_recipe
from trimtab.starter import base_folder


@dataclass(frozen=True)
class StoredConfig:
    """The stored configuration of a run that is resumed."""

    resolved: Resolved
    model: Path
    """The folder with the run's config and tokenizer."""
    commit: str | None
    device: DeviceFacts
    """The device that the run resumes on."""
    memory_changed: bool = False
    """Whether the recipe's memory keys (recompute policy, limit) have changed."""
    moved: bool = False
    """Whether the device has changed, so that the memory plan is resolved as for a new run."""


@dataclass(frozen=True)
class Prepared:
    """A resolved and planned recipe, before any data is read."""

    recipe: Recipe
    device: DeviceFacts
    shape: ModelShape
    model: Path
    """Folder or GGUF file with config and tokenizer."""
    commit: str | None
    resolved: Resolved
    plan: Plan


def prepare(
    recipe: Recipe, stored: StoredConfig | None = None, *, device: DeviceFacts | None = None
) -> Prepared:
    """Finds the model, resolves every `auto` and makes the plan.

    Only config and tokenizer of a hub id are downloaded here, so that a run that does not fit downloads no weights. A
    run that is resumed has both in its folder, with its resolved configuration (`stored`).

    Args:
        recipe: the recipe.
        stored: the stored configuration of a run that is resumed.
        device: plan for this device instead of the one that the recipe requests on this machine.
    """
    if stored is not None:
        shape = read_shape(stored.model)
        resolved = _resolve_resumed(recipe, shape, stored)
        return _planned(recipe, shape, stored.device, resolved, stored.model, stored.commit)
    num_threads = threads() if device is None else host_cores()
    device = device or detect(recipe.device, recipe.num_threads)
    model, commit = model_folder(recipe.model.name, revision=recipe.model.revision, weights=False)
    check_same_tokens(recipe, model)
    shape = shape_of(recipe, model)
    check_replay(recipe, model)
    prepared = prepare_shape(recipe, shape, device, num_threads=num_threads, model=model, commit=commit)
    plan = dataclasses.replace(prepared.plan, notes=(*model_notes(model), *prepared.plan.notes))
    return dataclasses.replace(prepared, plan=plan)


def prepare_shape(
    recipe: Recipe,
    shape: ModelShape,
    device: DeviceFacts,
    *,
    num_threads: int | None = None,
    model: Path = Path(),
    commit: str | None = None,
) -> Prepared:
    """Resolves and plans a new run of a model with this shape, without reading files of the model.

    Args:
        recipe: the recipe.
        shape: the model's shape.
        device: the device to plan for.
        num_threads: CPU threads that torch uses by default; this process's if None and the device is a CPU.
        model: the folder or file of the model, if there is one.
        commit: the commit of a hub model.

    Example:
        >>> prepare_shape(recipe, shape, detect("cpu")).plan.memory.needed  # doctest: +SKIP
        614858752
    """
    if num_threads is None:
        num_threads = threads() if device.kind == "cpu" else 1
    recipe = with_default_length(recipe, shape)
    resolved = resolve_recipe(recipe, shape, device, num_threads)
    return _planned(recipe, shape, device, resolved, model, commit)


def _planned(
    recipe: Recipe,
    shape: ModelShape,
    device: DeviceFacts,
    resolved: Resolved,
    model: Path,
    commit: str | None,
) -> Prepared:
    plan = make_plan(recipe, shape, resolved, device=device)
    check_embedding_learning_rate(plan)
    return Prepared(recipe, device, shape, model, commit, resolved, plan)


def with_default_length(recipe: Recipe, shape: ModelShape) -> Recipe:
    """The recipe, with a default sequence length reduced to the model's number of positions.

    Example:
        >>> from trimtab.recipe import loads
        >>> from trimtab.facts.shapes import uniform_shape
        >>> short = uniform_shape("llama", 64, 16, 32, 1, num_heads=2, num_kv_heads=1, head_dim=8, max_positions=128)
        >>> with_default_length(loads("model: a\\ndata: {train: x}"), short).max_seq_length
        128
    """
    if "max_seq_length" in recipe.model_fields_set or recipe.max_seq_length <= shape.max_positions:
        return recipe
    return recipe.model_copy(update={"max_seq_length": shape.max_positions})


def model_notes(model: Path) -> list[str]:
    """Notes for the user on unknown keys in a model's config.json."""
    unknown = unknown_config_keys(model)
    if not unknown:
        return []
    keys = f"the key {unknown[0]}" if len(unknown) == 1 else f"the keys {', '.join(unknown)}"
    return [
        f"{model / 'config.json'} has {keys}, which trimtab does not support and ignores: if it changes what the model "
        "computes, results differ from those of the published model"
    ]


def _resolve_resumed(recipe: Recipe, shape: ModelShape, stored: StoredConfig) -> Resolved:
    """The stored configuration of a run, with the changes that a resume may make."""
    resolved, device = stored.resolved, stored.device
    if recipe.num_threads is not None:
        resolved = dataclasses.replace(resolved, threads=recipe.num_threads)
    if stored.moved:
        return resolve_memory(recipe, shape, device, resolved)
    if resolved.memory is None or stored.memory_changed:
        return resolve_memory_on_resume(recipe, shape, device, resolved)
    return resolve_graphs(recipe, shape, device, resolved)


def check_embedding_learning_rate(plan: Plan) -> None:
    """Raises RecipeError for an `embedding_learning_rate` if neither embeddings nor head are trained."""
    if plan.recipe.embedding_learning_rate is None:
        return
    names = (parameter.name for parameter in plan.job.trained.parameters)
    if not any(name.startswith((f"{EMBEDDING}.", f"{HEAD}.")) for name in names):
        raise RecipeError(
            "embedding_learning_rate is set, and neither embeddings nor head are trained",
            "add embed_tokens or lm_head to lora.modules_to_save, or leave embedding_learning_rate out",
        )


def note_untrained_head(prepared: Prepared) -> str | None:
    """A note for the user if tokens are added and the head is not trained; otherwise None."""
    tokens, parameters = prepared.recipe.model.added_tokens, prepared.plan.job.trained.parameters
    has_head = not prepared.shape.tie_embeddings
    if not tokens or not has_head or any(parameter.name.startswith(f"{HEAD}.") for parameter in parameters):
        return None
    return (
        "model.added_tokens: the model learns to read these tokens but not to generate them, because its head is not "
        "trained; add lm_head to lora.modules_to_save to train it"
    )


REPLAY = "starter:replay"
"""Text of the kind that the starter was pretrained on."""


def check_replay(recipe: Recipe, model: Path) -> None:
    """Raises RecipeError if `starter:replay` would be mixed into the training of a model other than the starter.

    A model that was trained from the starter has the starter's tokenizer, and may use its replay text.
    """
    replay = recipe.data.replay
    if replay is None or recipe.model.name == STARTER:
        return
    if all(source.source != REPLAY for source in replay.sources):
        return
    if not unknown_tokens(text.load(base_folder()), tokenizer_of(recipe, model, None)[0]):
        return
    raise replay_error(recipe)


def replay_error(recipe: Recipe) -> RecipeError:
    """The error for `starter:replay` with a model other than the starter."""
    return RecipeError(
        f"data.replay mixes in {REPLAY}, text that the starter was pretrained on, but model.name is "
        f"{recipe.model.name}",
        "set data.replay=null to train without replay, or name general text of your own: "
        "data.replay.sources=[./general-text]",
    )
