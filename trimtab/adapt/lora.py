"""LoRA adapters of a decoder: add, list, switch, initialize.

    add_adapters(decoder, LoraSettings(r=16))       on the meta device too
    load_weights(decoder, "my-model")
    init_adapters(decoder, seed=0)
    use_adapters(decoder, "default")

The model's parameter names do not change; see `lora_layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from trimtab.adapt import targets
from trimtab.adapt.lora_dropout import DropoutMasks
from trimtab.adapt.lora_layers import LoRAEmbedding, LoRALinear
from trimtab.adapt.saved_modules import drop_modules, resolve_modules, switch_modules
from trimtab.adapt.spec import DEFAULT, LoraSettings, TargetModule, check_trainable, resolve_targets
from trimtab.adapt.spec_quantized import check_not_quantized
from trimtab.facts.errors import ModelError, RecipeError
from trimtab.model.decoder import Decoder

__all__ = ["LoRAEmbedding", "LoRALinear", "add_adapters", "init_adapters", "use_adapters"]


def add_adapters(decoder: Decoder, settings: LoraSettings, *, adapter: str = DEFAULT) -> Decoder:
    """Adds adapters to a decoder, active and trainable; everything else is frozen. Works on any device, including meta.

    The model's parameter names do not change. The adapters are uninitialized until `init_adapters` or `load_adapter`.
    Another call with another name adds a second adapter.

    Raises for settings that cannot be trained; use `load_adapter` for inference with an existing adapter.

    Args:
        decoder: from `build`, quantized or not.
        settings: which modules, rank, alpha and so on.
        adapter: its name.

    Example:
        >>> add_adapters(decoder, LoraSettings(r=8))  # doctest: +SKIP
        >>> load_weights(decoder, "my-model")  # doctest: +SKIP
        >>> init_adapters(decoder, seed=0)  # doctest: +SKIP
    """
    check_trainable(decoder.shape, settings)
    return attach_adapters(decoder, settings, adapter)


def attach_adapters(decoder: Decoder, settings: LoraSettings, adapter: str) -> Decoder:
    """Like `add_adapters`, without checking that the adapter can be trained."""
    if not adapter.replace("-", "_").isidentifier():
        raise RecipeError(f"{adapter!r} cannot be an adapter's name", "use letters, digits, - and _")
    if hasattr(nn.ParameterDict(), adapter) or hasattr(nn.ModuleDict(), adapter):
        raise RecipeError(
            f"{adapter!r} is reserved by torch and cannot be an adapter's name", "give it another name"
        )
    if adapter in adapter_names(decoder):
        raise RecipeError(f"the model already has an adapter {adapter}", "give this one another name")
    for target in resolve_targets(decoder.shape, settings):
        _get_or_attach(decoder, target).add(adapter, settings, r=target.r, scaling=target.scaling)
    use_adapters(decoder, adapter)
    train_only(decoder, adapter, settings)
    return decoder


def _get_or_attach(decoder: Decoder, target: TargetModule) -> LoRALinear | LoRAEmbedding:
    """Returns the adapted layer of a target; replaces the base layer by it if necessary."""
    module = decoder.get_submodule(target.name)
    if isinstance(module, LoRALinear | LoRAEmbedding):
        return module
    kind = LoRAEmbedding if target.matrix.is_embedding else LoRALinear
    wrapped = kind(module, target.name)
    wrapped.train(module.training)
    above, _, last = target.name.rpartition(".")
    setattr(decoder.get_submodule(above), last, wrapped)
    return wrapped


def train_only(decoder: Decoder, adapter: str, settings: LoraSettings) -> None:
    """Freezes everything but one adapter and its fully trained modules."""
    for parameter in decoder.parameters():
        parameter.requires_grad_(False)
    saved_modules = set(targets.select_modules(decoder.shape, settings.modules_to_save))
    found = dict(decoder.named_parameters())
    for name in saved_modules:
        if name not in found:
            check_not_quantized(decoder.shape, [name])
        found[name].requires_grad_(True)
    for layer in adapted_layers(decoder):
        for parameter in layer.own_parameters(adapter).values():
            parameter.requires_grad_(True)


def save_active_adapters(decoder: nn.Module) -> Callable[[], None]:
    """Returns a function that restores the current active adapters and trainable parameters."""
    active, trainable = active_adapters(decoder), [(p, p.requires_grad) for p in decoder.parameters()]

    def restore() -> None:
        use_adapters(decoder, active)
        for parameter, requires_grad in trainable:
            parameter.requires_grad_(requires_grad)

    return restore


def adapted_layers(decoder: nn.Module) -> Iterator[LoRALinear | LoRAEmbedding]:
    """Every adapted layer, in the model's order."""
    for module in decoder.modules():
        if isinstance(module, LoRALinear | LoRAEmbedding):
            yield module


def adapter_names(decoder: nn.Module) -> list[str]:
    """Names of a model's adapters."""
    return list(dict.fromkeys(name for layer in adapted_layers(decoder) for name in layer.settings))


def active_adapters(decoder: nn.Module) -> list[str]:
    """Names of the active adapters."""
    return list(dict.fromkeys(name for layer in adapted_layers(decoder) for name in layer.active))


def use_adapters(decoder: nn.Module, names: str | Sequence[str]) -> None:
    """Sets the active adapters: one, several (their outputs are summed), or none with an empty list.

    Example:
        >>> use_adapters(decoder, "french")  # doctest: +SKIP
        >>> use_adapters(decoder, [])  # the base model  # doctest: +SKIP
    """
    wanted = (names,) if isinstance(names, str) else tuple(names)
    for name in wanted:
        _check_adapter(decoder, name)
        if wanted.count(name) > 1:
            raise RecipeError(f"adapter {name} is named {wanted.count(name)} times", "name each one once")
    chosen = [
        (layer, tuple(name for name in wanted if name in layer.settings)) for layer in adapted_layers(decoder)
    ]
    for layer, active in chosen:
        if len(active) > 1 and any(layer.settings[name].use_dora for name in active):
            raise RecipeError("adapters with DoRA cannot be combined", "use one at a time")
    modules = resolve_modules(decoder, wanted)
    # Nothing raises from here on: an error leaves the model unchanged.
    for layer, active in chosen:
        layer.active = active
    switch_modules(decoder, modules)


def remove_adapter(decoder: nn.Module, adapter: str) -> None:
    """Deactivates and removes an adapter."""
    _check_adapter(decoder, adapter)
    use_adapters(decoder, [name for name in active_adapters(decoder) if name != adapter])
    for layer in adapted_layers(decoder):
        layer.remove(adapter)
    drop_modules(decoder, adapter)


def init_adapters(decoder: Decoder, seed: int, *, adapter: str = DEFAULT) -> None:
    """Initializes an adapter from (seed, name); the model's output does not change.

    Call it after the weights are loaded: DoRA's magnitudes are computed from them.
    """
    _check_adapter(decoder, adapter)
    for layer in adapted_layers(decoder):
        if adapter in layer.settings:
            layer.reset(adapter, seed)


def _check_adapter(decoder: nn.Module, adapter: str) -> None:
    there = adapter_names(decoder)
    if adapter not in there:
        raise RecipeError(f"the model has no adapter {adapter}", f"it has {', '.join(there) or 'none'}")


def trained_parameters(decoder: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters, by name."""
    return {name: p for name, p in decoder.named_parameters() if p.requires_grad}


def create_dropout_masks(decoder: Decoder, device: torch.device) -> DropoutMasks | None:
    """Creates the dropout mask keys of all adapted layers and gives each layer its row; None without dropout."""
    layers = [layer for layer in adapted_layers(decoder) if isinstance(layer, LoRALinear)]
    if not any(settings.lora_dropout for layer in layers for settings in layer.settings.values()):
        return None
    masks = DropoutMasks([layer.path for layer in layers], device)
    for layer, key_5 in zip(layers, masks.words_K5, strict=True):
        layer.mask_key_5 = key_5
    return masks


def check_finite(decoder: nn.Module, adapter: str = DEFAULT) -> None:
    """Raises ModelError if an adapter contains NaN or infinity."""
    for layer in adapted_layers(decoder):
        for name, parameter in layer.own_parameters(adapter).items():
            if not bool(torch.isfinite(parameter).all()):
                raise ModelError(
                    f"adapter {adapter}: {layer.path}.{name} contains NaN or infinity",
                    "use an earlier checkpoint",
                )
