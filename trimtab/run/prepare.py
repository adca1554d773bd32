"""A recipe meets a machine and a model: every `auto` decided, the plan made. No torch, no data, no weights."""

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
from trimtab.run.resolve import resolve_graphs, resolve_memory, resolve_memory_again, resolve_recipe
from trimtab.starter import base_folder


@dataclass(frozen=True)
class Frozen:
    """What a run folder keeps of its beginning."""

    resolved: Resolved
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
    resolved: Resolved
    plan: Plan


def prepare(recipe: Recipe, frozen: Frozen | None = None, *, device: DeviceFacts | None = None) -> Prepared:
    """Finds the model, decides every `auto` and makes the plan.

    Of a hub id only config and tokenizer are fetched here, so that a run that does not fit costs no download. A run
    that is continued has both in its folder (`frozen`), with what was decided when it began.

    Args:
        recipe: what is asked.
        frozen: what a run folder keeps of its beginning.
        device: plan for this device instead of the one that the recipe asks for on this machine.
    """
    if frozen is None:
        num_threads = threads() if device is None else host_cores()
        device = device or detect(recipe.device)
        model, commit = model_folder(recipe.model.name, revision=recipe.model.revision, weights=False)
        check_same_tokens(recipe, model)
        shape = shape_of(recipe, model)
        check_replay(recipe, model)
        recipe = default_length(recipe, shape)
        resolved = resolve_recipe(recipe, shape, device, num_threads)
    else:
        device, model, commit = frozen.device, frozen.model, frozen.commit
        shape = read_shape(model)
        resolved = _resolve_resumed(recipe, shape, frozen)
    plan = make_plan(recipe, shape, resolved, device=device)
    check_rates(plan)
    if frozen is None:
        plan = dataclasses.replace(plan, notes=(*model_notes(model), *plan.notes))
    return Prepared(recipe, device, shape, model, commit, resolved, plan)


def default_length(recipe: Recipe, shape: ModelShape) -> Recipe:
    """The recipe, its sequence length lowered to the model's positions where the recipe leaves it at the default.

    Example:
        >>> from trimtab.recipe import loads
        >>> from trimtab.facts.shapes import uniform_shape
        >>> short = uniform_shape("llama", 64, 16, 32, 1, num_heads=2, num_kv_heads=1, head_dim=8, max_positions=128)
        >>> default_length(loads("model: a\\ndata: {train: x}"), short).max_seq_length
        128
    """
    if "max_seq_length" in recipe.model_fields_set or recipe.max_seq_length <= shape.max_positions:
        return recipe
    return recipe.model_copy(update={"max_seq_length": shape.max_positions})


def model_notes(model: Path) -> list[str]:
    """What the user should know of a model's config.json."""
    unknown = unknown_config_keys(model)
    if not unknown:
        return []
    keys = f"the key {unknown[0]}" if len(unknown) == 1 else f"the keys {', '.join(unknown)}"
    return [
        f"{model / 'config.json'} has {keys}, which trimtab does not know and ignores: if it changes what the model "
        "computes, this is another model than the published one"
    ]


def _resolve_resumed(recipe: Recipe, shape: ModelShape, frozen: Frozen) -> Resolved:
    """The configuration that a run began with, and what a resume may change of it."""
    resolved, device = frozen.resolved, frozen.device
    if recipe.num_threads is not None:
        resolved = dataclasses.replace(resolved, threads=recipe.num_threads)
    if frozen.moved:
        resolved = resolve_memory(recipe, shape, device, resolved)
    elif resolved.memory is None or frozen.memory_changed:
        resolved = resolve_memory_again(recipe, shape, device, resolved)
    return resolve_graphs(recipe, shape, device, resolved)


def check_rates(plan: Plan) -> None:
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


REPLAY = "starter:replay"
"""Text of the kind that the starter was pretrained on."""


def check_replay(recipe: Recipe, model: Path) -> None:
    """RecipeError where `starter:replay` would be mixed into the training of another model than the starter.

    A model that came from the starter has its tokenizer, and keeps its replay.
    """
    replay = recipe.data.replay
    if replay is None or recipe.model.name == STARTER:
        return
    if all(source.source != REPLAY for source in replay.sources):
        return
    if not unknown_tokens(text.load(base_folder()), tokenizer_of(recipe, model, None)[0]):
        return
    raise replay_refused(recipe)


def replay_refused(recipe: Recipe) -> RecipeError:
    """The answer to `starter:replay` beside another model than the starter."""
    return RecipeError(
        f"data.replay mixes in {REPLAY}, which is text that the starter was pretrained on, and model.name is "
        f"{recipe.model.name}",
        "set data.replay=null to train without replay, or name general text of your own: "
        "data.replay.sources=[./general-text]",
    )
