"""Saves adapters in peft's format, and loads adapters that peft saved."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from trimtab.adapt import targets
from trimtab.adapt.lora import (
    adapted_layers,
    attach_adapters,
    remove_adapter,
    save_active_adapters,
    use_adapters,
)
from trimtab.adapt.peft_config import (
    AdapterFolder,
    fit_to_model,
    is_base_copy,
    other_base_error,
    plain_name,
    read_adapter_folder,
    tied_embedding_error,
    to_peft_config,
)
from trimtab.adapt.peft_reading import BASE_KEY, CONFIG, PREFIX, WEIGHTS
from trimtab.adapt.saved_modules import store_modules
from trimtab.adapt.spec import DEFAULT, LoraSettings
from trimtab.facts.base_weights import BaseWeights
from trimtab.facts.errors import ModelError, RecipeError
from trimtab.facts.files import write_json
from trimtab.model.decoder import Decoder
from trimtab.model.save import write_tensors

HEAD_KEY = f"{targets.HEAD}.weight"
EMBEDDING_KEY = f"{targets.EMBEDDING}.weight"


def file_name(name: str, adapter: str) -> str:
    """Returns a tensor's name in peft's file, from its name in the model.

    Example:
        >>> file_name("model.layers.0.mlp.up_proj.lora_A.default.weight", "default")
        'base_model.model.model.layers.0.mlp.up_proj.lora_A.weight'
    """
    name = name.removesuffix(f".{adapter}") if name.endswith(f".{adapter}") else name
    name = name.replace(f".lora_magnitude_vector.{adapter}.weight", ".lora_magnitude_vector")
    return PREFIX + name.replace(f".{adapter}.weight", ".weight")


def adapter_tensors(decoder: Decoder, adapter: str = DEFAULT) -> dict[str, torch.nn.Parameter]:
    """An adapter's own parameters by their names in the model."""
    return {
        f"{layer.path}.{name}": parameter
        for layer in adapted_layers(decoder)
        for name, parameter in layer.own_parameters(adapter).items()
    }


def stored_tensors(decoder: Decoder, adapter: str = DEFAULT) -> dict[str, torch.Tensor]:
    """Returns all tensors of an adapter's file by their names in it: the adapter's, and fully trained modules.

    A tied head is stored in addition to the embedding, so that every peft version replaces both.
    """
    settings = settings_of(decoder, adapter)
    tensors = {file_name(name, adapter): p.detach() for name, p in adapter_tensors(decoder, adapter).items()}
    parameters = dict(decoder.named_parameters())
    whole = targets.select_modules(decoder.shape, settings.modules_to_save)
    for name in whole:
        tensors[PREFIX + name] = parameters[name].detach()
    if decoder.shape.tie_embeddings and EMBEDDING_KEY in whole:
        tensors[PREFIX + HEAD_KEY] = parameters[EMBEDDING_KEY].detach()
    return tensors


def save_adapter(
    decoder: Decoder,
    folder: str | Path,
    *,
    adapter: str = DEFAULT,
    base_name: str,
    revision: str | None = None,
    base: BaseWeights | None = None,
) -> list[Path]:
    """Writes adapter_config.json and adapter_model.safetensors into an existing folder; returns the files.

    Args:
        decoder: with the adapter, and its fully trained modules active.
        folder: the destination.
        adapter: name of the adapter.
        base_name: the base's hub id or folder, for peft.
        revision: the base's commit.
        base: source, revision and checksums, stored in the file's header for trimtab.
    """
    folder = Path(folder)
    settings = settings_of(decoder, adapter)
    stored = {
        name: tensor.to("cpu", copy=True).contiguous()
        for name, tensor in stored_tensors(decoder, adapter).items()
    }
    for name, tensor in stored.items():
        if not bool(torch.isfinite(tensor).all()):
            raise ModelError(
                f"{name} contains NaN or infinity", "the training diverged; use an earlier checkpoint"
            )
    metadata = {"format": "pt"}
    if base is not None:
        metadata[BASE_KEY] = json.dumps(base.to_dict(), sort_keys=True)
    config = to_peft_config(
        decoder.shape,
        settings,
        base_name=base_name,
        revision=revision,
        tied_head=PREFIX + HEAD_KEY in stored and decoder.shape.tie_embeddings,
    )
    write_json(folder / CONFIG, config)
    write_tensors(stored, folder / WEIGHTS, metadata)
    return [folder / CONFIG, folder / WEIGHTS]


def settings_of(decoder: Decoder, adapter: str = DEFAULT) -> LoraSettings:
    """The settings of an adapter."""
    for layer in adapted_layers(decoder):
        if adapter in layer.settings:
            return layer.settings[adapter]
    raise RecipeError(f"the model has no adapter {adapter}", "train one, or load one")


def load_adapter(decoder: Decoder, folder: str | Path, *, adapter: str = DEFAULT) -> AdapterFolder:
    """Loads an adapter from peft's files into a decoder, in addition to others, and makes it the active one.

    Raises:
        ModelError: the files are missing, damaged, not LoRA, of another base, or contain NaN or infinity.
    """
    found = fit_to_model(decoder.shape, read_adapter_folder(folder))
    restore = save_active_adapters(decoder)
    attach_adapters(decoder, found.settings, adapter)
    try:
        copy_adapter_tensors(decoder, found, adapter=adapter)
    except ModelError:  # leave the model unchanged
        remove_adapter(decoder, adapter)
        restore()
        raise
    use_adapters(decoder, adapter)
    return found


@torch.no_grad()
def copy_adapter_tensors(
    decoder: Decoder, found: AdapterFolder, *, adapter: str = DEFAULT, switchable: bool = True
) -> None:
    """Copies an adapter's tensors from its file into a decoder that already has its layers.

    Modules that it fully replaces are stored in addition to the model's, so that `use_adapters` can switch; without
    `switchable` they are overwritten, which needs no memory.
    """
    stored = {key.removeprefix(PREFIX): t for key, t in load_file(found.folder / WEIGHTS).items()}
    for key, tensor in stored.items():
        if not bool(torch.isfinite(tensor).all()):
            raise ModelError(
                f"{found.folder / WEIGHTS}: {key} contains NaN or infinity",
                "download the adapter again, or train it again",
            )
    own = adapter_tensors(decoder, adapter)
    keys = {file_name(name, adapter).removeprefix(PREFIX): name for name in own}
    for key, name in keys.items():
        if key not in stored:
            raise ModelError(f"{found.folder / WEIGHTS} has no {key}", "download the adapter again")
        _check_dims(found, key, stored[key], own[name])
        own[name].copy_(stored[key])
    rest = {plain_name(key): stored[key] for key in stored if key not in keys and not is_base_copy(key)}
    _check_base_copies(decoder, found, {plain_name(key): stored[key] for key in stored if is_base_copy(key)})
    whole = _module_tensors(decoder, found, rest)
    if whole and switchable:
        store_modules(decoder, adapter, whole)
    elif whole:
        parameters = dict(decoder.named_parameters())
        for name, tensor in whole.items():
            parameters[name].copy_(tensor)


def _check_base_copies(decoder: Decoder, found: AdapterFolder, stored: dict[str, torch.Tensor]) -> None:
    parameters = dict(decoder.named_parameters())
    for name, tensor in stored.items():
        own = parameters.get(name)
        if own is None or own.shape != tensor.shape or not torch.equal(tensor.to(own.device, own.dtype), own):
            raise other_base_error(
                found,
                f"it has a copy of its base's {name.removesuffix('.weight')}, which differs from this model's",
            )


def _module_tensors(
    decoder: Decoder, found: AdapterFolder, stored: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    parameters = dict(decoder.named_parameters())
    head = stored.get(HEAD_KEY)
    if decoder.shape.tie_embeddings and head is not None:
        if not torch.equal(head, stored.get(EMBEDDING_KEY, torch.empty(0))):
            raise tied_embedding_error(found, "it trains the head separately from the embedding")
        stored = {name: tensor for name, tensor in stored.items() if name != HEAD_KEY}
    for name, tensor in stored.items():
        if name not in parameters:
            raise other_base_error(found, f"it replaces {name}, and this model has no such tensor")
        _check_dims(found, name, tensor, parameters[name])
    return stored


def _check_dims(found: AdapterFolder, name: str, stored: torch.Tensor, wanted: torch.Tensor) -> None:
    if stored.shape != wanted.shape:
        raise other_base_error(
            found, f"{name} is {list(stored.shape)} in the file and {list(wanted.shape)} in the model"
        )
