"""Starts a run from a loaded model: from its source if the weights are unchanged, otherwise from a copy of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from trimtab.adapt import adapter_names
from trimtab.facts.dtypes import TORCH_NAMES
from trimtab.facts.errors import RecipeError
from trimtab.facts.units import format_bytes
from trimtab.model import read_generation_config, read_shape, read_token_ids, save_folder
from trimtab.model.weights import find_changed_weight
from trimtab.recipe import Recipe
from trimtab.run.locate import START_FOLDER
from trimtab.run.models import OpenedModel


def check_start(recipe: Recipe, opened: OpenedModel) -> None:
    """Raises RecipeError for a loaded model that a run cannot start from."""
    if recipe.model.init == "random":
        raise RecipeError(
            "model.init: random requests new weights, and a loaded model was passed",
            "leave model.init out, or name the model instead of passing it",
        )
    adapters = adapter_names(opened.decoder)
    if adapters:
        raise RecipeError(
            f"the model has adapters ({', '.join(sorted(adapters))}), and a run needs weights without adapters",
            "merge them: model.merge(folder), then model=folder; or continue training the adapter: "
            "model.save_adapter(folder), then the base as model with lora={'adapter': folder}",
        )
    parameters = dict(opened.decoder.named_parameters())
    quantized = [name for name, _ in opened.decoder.shape.parameters() if name not in parameters]
    if quantized:
        raise RecipeError(
            f"the model is quantized ({quantized[0]}), and a run needs unquantized weights",
            "name its source as the model, with load_in_4bit or load_in_8bit and lora",
        )


def start_from(recipe: Recipe, opened: OpenedModel, folder: Path, on_event: Callable[[str], None]) -> Recipe:
    """Returns the recipe with a model that can be loaded again later and has the weights in memory.

    That is the model's source, if the weights are unchanged. Otherwise, and for a model of another run, they are
    written to `start` in the run folder, in their dtype.
    """
    check_start(recipe, opened)
    if opened.step is None and not opened.own_tokenizer and _is_source(opened):
        return _named(recipe, opened.name, opened.commit)
    dtype = next(
        name
        for name, theirs in TORCH_NAMES.items()
        if f"torch.{theirs}" == str(next(opened.decoder.parameters()).dtype)
    )
    place = folder.absolute() / START_FOLDER
    files = save_folder(
        opened.decoder,
        place,
        dtype=dtype,
        config_extra=read_token_ids(opened.folder),
        generation_config=read_generation_config(opened.folder),
    )
    opened.tokenizer.save(place)
    size = sum(file.stat().st_size for file in files)
    on_event(f"the run starts from the model's weights in memory: {place} ({dtype}, {format_bytes(size)})")
    return _named(recipe, str(place), None)


def _is_source(opened: OpenedModel) -> bool:
    return read_shape(opened.folder) == opened.decoder.shape and (
        find_changed_weight(opened.decoder, opened.folder) is None
    )


def _named(recipe: Recipe, name: str, revision: str | None) -> Recipe:
    model = recipe.model.model_copy(update={"name": name, "revision": revision})
    return recipe.model_copy(update={"model": model})
