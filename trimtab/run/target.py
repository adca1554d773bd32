"""Resolves the target of `trimtab plan`: a recipe, or a model with a method, on this machine or another device.

Needs no torch, no data and, for models of the catalogue, no network.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.facts.devices import DeviceFacts
from trimtab.facts.errors import ModelError, RecipeError
from trimtab.facts.gguf_header import is_gguf
from trimtab.facts.gpus import find_gpu
from trimtab.facts.names import unusable_name
from trimtab.facts.shapes import ModelShape
from trimtab.facts.units import parse_bytes
from trimtab.hub.local_files import looks_local
from trimtab.model.catalogue import CatalogueEntry, find_model, suggest_models
from trimtab.model.families import FAMILIES, shape_for_planning
from trimtab.model.families.config_json import read_model_json
from trimtab.model.source import read_shape_for_planning
from trimtab.plan import Plan
from trimtab.recipe import Recipe, build, load, loads
from trimtab.recipe.shipped import shipped_recipes
from trimtab.run.device import detect
from trimtab.run.locate import STARTER, missing_sources, model_folder, shape_of
from trimtab.run.prepare import (
    REPLAY,
    prepare,
    prepare_shape,
    replay_error,
)

METHODS = ("full", "lora", "qlora", "int8")
NO_DATA = "your-data"
"""Placeholder for the training data if only a model is named."""


@dataclass(frozen=True)
class PlanTarget:
    """A recipe, the shape of its model and the device to plan for."""

    recipe: Recipe
    shape: ModelShape
    device: DeviceFacts
    plan: Plan
    notes: tuple[str, ...] = ()
    """Notes on the data and the model, in addition to the plan's own."""

    def plan_for(self, recipe: Recipe, device: DeviceFacts) -> Plan:
        """Plans the same model with another recipe or on another device, with every `auto` resolved for it."""
        return plan_shape(recipe, self.shape, device)


def plan_shape(recipe: Recipe, shape: ModelShape, device: DeviceFacts) -> Plan:
    """Plans a recipe from the model's shape alone, without reading files of the model."""
    return _with_validation(prepare_shape(recipe, shape, device).plan)


def _with_validation(plan: Plan) -> Plan:
    """The plan; its times are labelled as not validated if no run of the model's family can be measured."""
    if plan.shape.family in FAMILIES:
        return plan
    return dataclasses.replace(plan, time=plan.time.unvalidated())


def read_target(
    target: str,
    overrides: Sequence[str] = (),
    *,
    gpu: str | None = None,
    method: str | None = None,
    host_memory: str | None = None,
) -> PlanTarget:
    """Resolves and plans a target by name.

    Args:
        target: a recipe file or the name of one that ships with trimtab; or a model: a hub id of the catalogue, a
            config.json, a folder, a GGUF file, `starter`.
        overrides: `key=value` settings of the recipe.
        gpu: a GPU of the data sheets or an amount of memory; None for this machine's device.
        method: full, lora, qlora or int8; overrides the recipe's.
        host_memory: free host memory, for a GPU of another machine.

    Example:
        >>> target = read_target("Qwen/Qwen3-8B", gpu="24GB", method="qlora")
        >>> target.plan.memory.needed < 24 * 10**9
        True
    """
    recipe = named_recipe(target, overrides, method)
    return plan_recipe(recipe, gpu=gpu, host_memory=host_memory)


def named_recipe(target: str, overrides: Sequence[str] = (), method: str | None = None) -> Recipe:
    """The recipe of a target; for a model name the default recipe, without data."""
    if is_recipe(target):
        return with_method(load(target, overrides), method)
    text = f"model: {{name: {_quoted(target)}}}\ndata: {{train: {NO_DATA}}}"
    return with_method(loads(text, overrides, name="the defaults"), method)


def plan_recipe(
    recipe: Recipe, *, gpu: str | None = None, method: str | None = None, host_memory: str | None = None
) -> PlanTarget:
    """Plans a recipe; the shapes of models in the catalogue are taken from there.

    Args:
        recipe: the recipe; with `NO_DATA` as its data only the model's shape is read.
        gpu: as in `read_target`.
        method: as in `read_target`.
        host_memory: as in `read_target`.
    """
    recipe = with_method(recipe, method)
    device = planned_device(recipe, gpu, host_memory)
    missing = [name for name in missing_sources(recipe) if name != NO_DATA]
    notes = [f"{name} does not exist here, so training would fail immediately" for name in missing]
    found = known_shape(recipe)
    if found is None:
        prepared = prepare(recipe, device=device)
    else:
        shape, more = found
        notes += more
        prepared = prepare_shape(recipe, shape, device)
    plan = _with_validation(prepared.plan)
    return PlanTarget(prepared.recipe, prepared.shape, device, plan, tuple(notes))


def shape_of_recipe(recipe: Recipe) -> ModelShape:
    """The shape of a recipe's model, by any name that `read_target` accepts."""
    found = known_shape(recipe)
    if found is not None:
        return found[0]
    place = model_folder(recipe.model.name, revision=recipe.model.revision, weights=False)[0]
    return shape_of(recipe, place)


def known_shape(recipe: Recipe) -> tuple[ModelShape, tuple[str, ...]] | None:
    """(shape, notes) of a model of which no files need to be read; None for others.

    It is in the catalogue, or there is no training data, so that its tokenizer does not matter.
    """
    if recipe.data.train[0].source == NO_DATA:
        return model_shape(recipe.model.name)
    entry = _catalogued(recipe)
    if entry is None:
        return None
    if recipe.data.replay is not None and any(
        source.source == REPLAY for source in recipe.data.replay.sources
    ):
        raise replay_error(recipe)
    return entry.shape, _entry_notes(entry)


def planned_device(recipe: Recipe, gpu: str | None, host_memory: str | None = None) -> DeviceFacts:
    """The named GPU, or this machine's device as the recipe requests it."""
    free = _host_bytes(host_memory)
    if gpu is None:
        device = detect(recipe.device, recipe.num_threads)
        return device if free is None else dataclasses.replace(device, host_free_bytes=free)
    device = find_gpu(gpu)
    return device if free is None else dataclasses.replace(device, host_free_bytes=free)


def is_recipe(target: str) -> bool:
    """Whether a name refers to a recipe: a file that is not a model, or a recipe that ships with trimtab.

    Example:
        >>> is_recipe("qwen3-8b-qlora"), is_recipe("my.yaml"), is_recipe("Qwen/Qwen3-8B"), is_recipe("starter")
        (True, True, False, False)
    """
    if target == STARTER:
        return False
    if unusable_name(target) is not None:
        return True  # loading it raises an error that explains the name
    path = Path(target).expanduser()
    if path.suffix.lower() in (".yaml", ".yml") or target in shipped_recipes():
        return True
    if looks_local(target) and not path.exists():
        return path.suffix.lower() not in (".json", ".gguf")
    if path.is_dir():
        return not (_has_config(path) or any(path.glob("*.gguf")))
    if path.is_file():
        return path.suffix.lower() != ".json" and not is_gguf(path)
    if "/" in target or find_model(target) is not None:
        return False
    return bool(difflib.get_close_matches(target, shipped_recipes(), n=1, cutoff=0.7)) or not suggest_models(
        target
    )


def model_shape(name: str) -> tuple[ModelShape, tuple[str, ...]]:
    """(shape, notes) of a model by any name; nothing is downloaded."""
    path = Path(name).expanduser()
    if name == STARTER or path.exists():
        if path.suffix.lower() == ".json" and path.is_file():
            shape = shape_for_planning(read_model_json(path), str(path))
        else:
            shape = read_shape_for_planning(model_folder(name, weights=False)[0])
        notes = () if shape.family in FAMILIES else (_untrainable(name),)
        if (path / "recipe.yaml").is_file():
            recipe = path / "recipe.yaml"
            note = f"this plans the model of {name} with the default recipe; `trimtab plan {recipe}` plans the run"
            notes = (*notes, note)
        return shape, notes
    entry = find_model(name)
    if entry is not None:
        return entry.shape, _entry_notes(entry)
    if looks_local(name):
        raise ModelError(f"{name} does not exist", "check the path")
    near = suggest_models(name)
    meant = f"did you mean {' or '.join(near)}? Otherwise " if near else ""
    raise ModelError(
        f"{name} is not in trimtab's catalogue of models",
        f"{meant}plan it from its config.json: `trimtab plan path/to/config.json`; or name it in a recipe: its "
        "config.json is then downloaded from the hub",
    )


def with_method(recipe: Recipe, method: str | None) -> Recipe:
    """The recipe with another training method; its adapter settings are kept.

    Example:
        >>> recipe = with_method(loads("model: a\\ndata: {train: x}"), "qlora")
        >>> recipe.lora.r, recipe.load_in_4bit
        (16, True)
    """
    if method is None:
        return recipe
    check_method(method)
    plain = recipe.model_dump(mode="json", exclude_unset=True)
    keys: dict[str, Any] = {"load_in_4bit": method == "qlora", "load_in_8bit": method == "int8"}
    if method == "full":
        keys["lora"] = None
    elif recipe.lora is None:
        keys["lora"] = {"r": 16}
    return build(plain | keys)


def check_method(method: str) -> None:
    """Raises a RecipeError for a name that is not one of `METHODS`."""
    if method not in METHODS:
        raise RecipeError(f"--method {method} is not known", f"choose one of {', '.join(METHODS)}")


def _catalogued(recipe: Recipe) -> CatalogueEntry | None:
    """The catalogue's entry of a recipe's model if the plan needs only its shape and it is not a local path."""
    model = recipe.model
    if model.revision is not None or model.added_tokens or model.tokenizer is not None:
        return None
    if model.name == STARTER or Path(model.name).expanduser().exists() or looks_local(model.name):
        return None
    return find_model(model.name)


def _entry_notes(entry: CatalogueEntry) -> tuple[str, ...]:
    return () if entry.trainable else (_untrainable(entry.name),)


def _untrainable(name: str) -> str:
    return f"trimtab cannot train {name} yet: its memory is planned, and predicted times are not validated"


def _has_config(path: Path) -> bool:
    return any((path / place / "config.json").is_file() for place in (".", "model"))


def _host_bytes(text: str | None) -> int | None:
    if text is None:
        return None
    size = parse_bytes(text)
    if not size:
        raise RecipeError(f"--host-memory {text} is not a size", "write it like 64GB or 64GiB")
    return size


def _quoted(text: str) -> str:
    """A name as a quoted YAML string."""
    return "'" + text.replace("'", "''") + "'"
