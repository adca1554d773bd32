"""The decoder that a run trains, as its recipe and choices have it."""

from __future__ import annotations

from typing import Any

from trimtab.adapt import add_adapters, compile_regions, init_adapters, keep_unpacked, recompute
from trimtab.adapt.peft_config import read_adapter_folder
from trimtab.adapt.peft_files import fill_adapter
from trimtab.adapt.tokens import fill_grown
from trimtab.facts.shapes import ModelShape
from trimtab.model import Decoder, build, check_weights, init_weights, load_weights, read_shape
from trimtab.model.building import torch_dtype
from trimtab.recipe import Recipe
from trimtab.run.adapters import check_adapter_base, settings_of
from trimtab.run.choices import Choices
from trimtab.run.precision import set_gradient_format
from trimtab.run.quantizing import lay_out


def load_decoder(
    recipe: Recipe, choices: Choices, shape: ModelShape, weights: Any, *, fresh: bool
) -> Decoder:
    """On the meta device shape, quantized layout, adapters, recompute, compile; then weights and gradients' format.

    No step changes a parameter's name. A checkpoint (not `fresh`) brings what is trained; frozen weights are always
    read from where they come from.
    """
    settings = settings_of(choices)
    read_weights = fresh or settings is not None
    stored = shape
    if read_weights and recipe.model.init != "random":
        stored = read_shape(weights)  # of fewer tokens, where some were added
        check_weights(stored, weights)
    decoder = build(
        shape,
        dtype=choices.weights_dtype,
        device="meta",
        attention=choices.attention["impl"],
        whole=choices.attention.get("whole"),
        loss_impl=choices.loss.get("impl", "chunked"),
        loss_memory=choices.memory["loss_memory"],
        pointwise=choices.pointwise.get("impl", "reference"),
    )
    lay_out(
        decoder,
        choices.quantization,
        None if recipe.model.init == "random" else weights,
        choices.device,
    )
    if settings is not None:
        add_adapters(decoder, settings)
    recompute.apply(decoder, choices.memory["recompute"], mlp_tiles=choices.memory["mlp_tiles"])
    if choices.compile.get("on"):
        compile_regions(decoder, dynamic=choices.compile["dynamic"])
    decoder.to_empty(device=choices.device)
    if read_weights and recipe.model.init == "random":
        init_weights(decoder, recipe.seed)
    elif read_weights:
        fill_grown(decoder, stored, lambda: load_weights(decoder, weights))
    if settings is not None and fresh:
        _fill_adapters(recipe, decoder, weights)
    set_gradient_format(decoder, choices)
    return decoder


def unpack(decoder: Decoder, choices: Choices) -> None:
    """Copies of packed weights, once all is loaded and before a step could be the one that takes the memory."""
    layers = choices.memory.get("unpacked_layers", 0)  # none in runs made before there was a choice
    keep_unpacked(decoder, layers, dtype=torch_dtype(choices.dtype))


def _fill_adapters(recipe: Recipe, decoder: Decoder, weights: Any) -> None:
    """The numbers that adapters start from: fresh ones, or those of the adapter that the recipe names."""
    assert recipe.lora is not None
    if recipe.lora.adapter is None:
        init_adapters(decoder, recipe.seed)
        return
    found = read_adapter_folder(recipe.lora.adapter)
    if recipe.model.init != "random":
        check_adapter_base(found.base, weights, found.folder)
    fill_adapter(decoder, found, switchable=False)
