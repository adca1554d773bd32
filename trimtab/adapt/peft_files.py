"""Adapters in peft's files: written so that peft loads them, read wherever peft wrote them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from trimtab.adapt import targets
from trimtab.adapt.lora import (
    adapted_layers,
    place_adapters,
    remembered,
    remove_adapter,
    use_adapters,
)
from trimtab.adapt.peft_config import (
    AdapterFolder,
    config_of,
    fitted,
    is_base_copy,
    one_matrix,
    other_base,
    plain_name,
    read_adapter_folder,
)
from trimtab.adapt.peft_reading import BASE_KEY, CONFIG, PREFIX, WEIGHTS
from trimtab.adapt.spec import DEFAULT, LoraSettings
from trimtab.adapt.whole import keep_whole
from trimtab.facts.base_weights import BaseWeights
from trimtab.facts.errors import ModelError, RecipeError
from trimtab.facts.files import write_json
from trimtab.model.decoder import Decoder
from trimtab.model.save import write_tensors

HEAD_KEY = f"{targets.HEAD}.weight"
EMBEDDING_KEY = f"{targets.EMBEDDING}.weight"


def file_name(name: str, adapter: str) -> str:
    """A tensor's name in a file, from its name in the model.

    Example:
        >>> file_name("model.layers.0.mlp.up_proj.lora_A.default.weight", "default")
        'base_model.model.model.layers.0.mlp.up_proj.lora_A.weight'
    """
    name = name.removesuffix(f".{adapter}") if name.endswith(f".{adapter}") else name
    name = name.replace(f".lora_magnitude_vector.{adapter}.weight", ".lora_magnitude_vector")
    return PREFIX + name.replace(f".{adapter}.weight", ".weight")


def own_tensors(decoder: Decoder, adapter: str = DEFAULT) -> dict[str, torch.nn.Parameter]:
    """An adapter's own parameters by their names in the model."""
    return {
        f"{layer.path}.{name}": parameter
        for layer in adapted_layers(decoder)
        for name, parameter in layer.own_parameters(adapter).items()
    }


def stored_tensors(decoder: Decoder, adapter: str = DEFAULT) -> dict[str, torch.Tensor]:
    """Everything that an adapter's file holds, by the names there: its own tensors, and modules trained whole.

    A tied head is stored beside the embedding, so that any version of peft replaces both.
    """
    settings = settings_of(decoder, adapter)
    tensors = {file_name(name, adapter): p.detach() for name, p in own_tensors(decoder, adapter).items()}
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
    """Write adapter_config.json and adapter_model.safetensors into a folder that exists; the files written.

    Args:
        decoder: with the adapter on it, its whole modules in place.
        folder: where to.
        adapter: which one.
        base_name: the base's hub id or folder, for peft.
        revision: the base's commit.
        base: source, revision and checksums, kept in the file's header for trimtab.
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
                f"{name} holds NaN or infinity", "the training went wrong; save an earlier checkpoint"
            )
    metadata = {"format": "pt"}
    if base is not None:
        metadata[BASE_KEY] = json.dumps(base.to_dict(), sort_keys=True)
    config = config_of(
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
    """The settings an adapter was made with."""
    for layer in adapted_layers(decoder):
        if adapter in layer.settings:
            return layer.settings[adapter]
    raise RecipeError(f"the model has no adapter {adapter}", "train one, or load one")


def load_adapter(decoder: Decoder, folder: str | Path, *, adapter: str = DEFAULT) -> AdapterFolder:
    """Put an adapter from peft's files on a decoder, beside others if it has some, and make it the active one.

    Raises:
        ModelError: the files are missing, damaged, not LoRA, of another base, or hold NaN or infinity.
    """
    found = fitted(decoder.shape, read_adapter_folder(folder))
    put_back = remembered(decoder)
    place_adapters(decoder, found.settings, adapter)
    try:
        fill_adapter(decoder, found, adapter=adapter)
    except ModelError:  # the model is as it was
        remove_adapter(decoder, adapter)
        put_back()
        raise
    use_adapters(decoder, adapter)
    return found


@torch.no_grad()
def fill_adapter(
    decoder: Decoder, found: AdapterFolder, *, adapter: str = DEFAULT, switchable: bool = True
) -> None:
    """Copy an adapter's numbers from its file into a decoder that has its layers already.

    Modules that it replaces as a whole are kept beside the model's own, to be switched (`use_adapters`); not
    `switchable` overwrites them, which takes no memory.
    """
    stored = {key.removeprefix(PREFIX): t for key, t in load_file(found.folder / WEIGHTS).items()}
    for key, tensor in stored.items():
        if not bool(torch.isfinite(tensor).all()):
            raise ModelError(
                f"{found.folder / WEIGHTS}: {key} holds NaN or infinity",
                "get the adapter again, or train it anew",
            )
    own = own_tensors(decoder, adapter)
    keys = {file_name(name, adapter).removeprefix(PREFIX): name for name in own}
    for key, name in keys.items():
        if key not in stored:
            raise ModelError(f"{found.folder / WEIGHTS} lacks {key}", "get the adapter again")
        _check_dims(found, key, stored[key], own[name])
        own[name].copy_(stored[key])
    rest = {plain_name(key): stored[key] for key in stored if key not in keys and not is_base_copy(key)}
    _check_base_copies(decoder, found, {plain_name(key): stored[key] for key in stored if is_base_copy(key)})
    whole = _whole_tensors(decoder, found, rest)
    if whole and switchable:
        keep_whole(decoder, adapter, whole)
    elif whole:
        parameters = dict(decoder.named_parameters())
        for name, tensor in whole.items():
            parameters[name].copy_(tensor)


def _check_base_copies(decoder: Decoder, found: AdapterFolder, stored: dict[str, torch.Tensor]) -> None:
    parameters = dict(decoder.named_parameters())
    for name, tensor in stored.items():
        own = parameters.get(name)
        if own is None or own.shape != tensor.shape or not torch.equal(tensor.to(own.device, own.dtype), own):
            raise other_base(
                found, f"it brings its base's {name.removesuffix('.weight')}, and this model's is another"
            )


def _whole_tensors(
    decoder: Decoder, found: AdapterFolder, stored: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    parameters = dict(decoder.named_parameters())
    head = stored.get(HEAD_KEY)
    if decoder.shape.tie_embeddings and head is not None:
        if not torch.equal(head, stored.get(EMBEDDING_KEY, torch.empty(0))):
            raise one_matrix(found, "it trains the head apart from the embedding")
        stored = {name: tensor for name, tensor in stored.items() if name != HEAD_KEY}
    for name, tensor in stored.items():
        if name not in parameters:
            raise other_base(found, f"it replaces {name}, and this model has no such tensor")
        _check_dims(found, name, tensor, parameters[name])
    return stored


def _check_dims(found: AdapterFolder, name: str, stored: torch.Tensor, wanted: torch.Tensor) -> None:
    if stored.shape != wanted.shape:
        raise other_base(found, f"{name} is {list(stored.shape)} there and {list(wanted.shape)} here")
