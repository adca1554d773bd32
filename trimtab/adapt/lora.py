"""Low-rank adapters on a decoder: added, named, switched, initialized.

    add_adapters(decoder, LoraSettings(r=16))       on the meta device too
    load_weights(decoder, "my-model")
    init_adapters(decoder, seed=0)
    use_adapters(decoder, "default")

No name of the model changes; see `lora_layers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from trimtab.adapt import targets
from trimtab.adapt.lora_dropout import Masks
from trimtab.adapt.lora_layers import LoRAEmbedding, LoRALinear
from trimtab.adapt.spec import DEFAULT, LoraSettings, Target, check_trainable, resolve
from trimtab.adapt.spec_quantized import check_whole
from trimtab.adapt.whole import choose_whole, drop_whole, switch_whole
from trimtab.facts.errors import ModelError, RecipeError
from trimtab.model.decoder import Decoder

__all__ = ["LoRAEmbedding", "LoRALinear", "add_adapters", "init_adapters", "use_adapters"]


def add_adapters(decoder: Decoder, settings: LoraSettings, *, adapter: str = DEFAULT) -> Decoder:
    """Put adapters on a decoder, active and trainable, everything else frozen; on any device, meta included.

    No name of the model changes. The adapters' numbers are undefined until `init_adapters` or `load_adapter`. Called
    again with another name it adds a second adapter beside the first.

    Settings that cannot be trained are refused; an adapter that is only used comes through `load_adapter`.

    Args:
        decoder: from `build`, quantized layout and all.
        settings: which modules, rank, alpha and so on.
        adapter: its name.

    Example:
        >>> add_adapters(decoder, LoraSettings(r=8))  # doctest: +SKIP
        >>> load_weights(decoder, "my-model")  # doctest: +SKIP
        >>> init_adapters(decoder, seed=0)  # doctest: +SKIP
    """
    check_trainable(decoder.shape, settings)
    return place_adapters(decoder, settings, adapter)


def place_adapters(decoder: Decoder, settings: LoraSettings, adapter: str) -> Decoder:
    """`add_adapters`, of an adapter that may be one to use and not to train."""
    if not adapter.replace("-", "_").isidentifier():
        raise RecipeError(f"{adapter!r} cannot be an adapter's name", "use letters, digits, - and _")
    if hasattr(nn.ParameterDict(), adapter) or hasattr(nn.ModuleDict(), adapter):
        raise RecipeError(
            f"{adapter!r} is a word of torch's own and no adapter's name", "give it another name"
        )
    if adapter in adapter_names(decoder):
        raise RecipeError(f"the model has an adapter {adapter} already", "give this one another name")
    for target in resolve(decoder.shape, settings):
        _adapted(decoder, target).add(adapter, settings, r=target.r, scaling=target.scaling)
    use_adapters(decoder, adapter)
    train_only(decoder, adapter, settings)
    return decoder


def _adapted(decoder: Decoder, target: Target) -> LoRALinear | LoRAEmbedding:
    """The adapted layer at a target's place, put there if it is not yet."""
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
    """Freeze everything but one adapter and the modules it trains whole."""
    for parameter in decoder.parameters():
        parameter.requires_grad_(False)
    whole = set(targets.select_modules(decoder.shape, settings.modules_to_save))
    found = dict(decoder.named_parameters())
    for name in whole:
        if name not in found:
            check_whole(decoder.shape, [name])
        found[name].requires_grad_(True)
    for layer in adapted_layers(decoder):
        for parameter in layer.own_parameters(adapter).values():
            parameter.requires_grad_(True)


def remembered(decoder: nn.Module) -> Callable[[], None]:
    """A function that puts back which adapters are in use now, and which parameters learn."""
    active, learning = active_adapters(decoder), [(p, p.requires_grad) for p in decoder.parameters()]

    def put_back() -> None:
        use_adapters(decoder, active)
        for parameter, learns in learning:
            parameter.requires_grad_(learns)

    return put_back


def adapted_layers(decoder: nn.Module) -> Iterator[LoRALinear | LoRAEmbedding]:
    """Every adapted layer, in the model's order."""
    for module in decoder.modules():
        if isinstance(module, LoRALinear | LoRAEmbedding):
            yield module


def adapter_names(decoder: nn.Module) -> list[str]:
    """Names of the adapters that a model has."""
    return list(dict.fromkeys(name for layer in adapted_layers(decoder) for name in layer.settings))


def active_adapters(decoder: nn.Module) -> list[str]:
    """Names of the adapters that take part in the computation."""
    return list(dict.fromkeys(name for layer in adapted_layers(decoder) for name in layer.active))


def use_adapters(decoder: nn.Module, names: str | Sequence[str]) -> None:
    """Which adapters take part: one, several (their parts are added), or none with an empty list.

    Example:
        >>> use_adapters(decoder, "french")  # doctest: +SKIP
        >>> use_adapters(decoder, [])  # the base model  # doctest: +SKIP
    """
    wanted = (names,) if isinstance(names, str) else tuple(names)
    for name in wanted:
        _check_there(decoder, name)
        if wanted.count(name) > 1:
            raise RecipeError(f"adapter {name} is named {wanted.count(name)} times", "name each one once")
    chosen = [
        (layer, tuple(name for name in wanted if name in layer.settings)) for layer in adapted_layers(decoder)
    ]
    for layer, active in chosen:
        if len(active) > 1 and any(layer.settings[name].use_dora for name in active):
            raise RecipeError("adapters with DoRA cannot be added up", "use one at a time")
    whole = choose_whole(decoder, wanted)
    # Nothing is refused from here on: a refusal leaves the model as it was.
    for layer, active in chosen:
        layer.active = active
    switch_whole(decoder, whole)


def remove_adapter(decoder: nn.Module, adapter: str) -> None:
    """Take an adapter off a model, and out of use."""
    _check_there(decoder, adapter)
    use_adapters(decoder, [name for name in active_adapters(decoder) if name != adapter])
    for layer in adapted_layers(decoder):
        layer.remove(adapter)
    drop_whole(decoder, adapter)


def init_adapters(decoder: Decoder, seed: int, *, adapter: str = DEFAULT) -> None:
    """Fresh numbers for an adapter, a function of (seed, name): the model computes what it did before.

    After the weights are loaded: DoRA's lengths are taken from them.
    """
    _check_there(decoder, adapter)
    for layer in adapted_layers(decoder):
        if adapter in layer.settings:
            layer.reset(adapter, seed)


def _check_there(decoder: nn.Module, adapter: str) -> None:
    there = adapter_names(decoder)
    if adapter not in there:
        raise RecipeError(f"the model has no adapter {adapter}", f"there are {', '.join(there) or 'none'}")


def trained_parameters(decoder: nn.Module) -> dict[str, nn.Parameter]:
    """What is trained, by name."""
    return {name: p for name, p in decoder.named_parameters() if p.requires_grad}


def set_masks(decoder: Decoder, device: torch.device) -> Masks | None:
    """The keys of the dropout masks, shared by all adapted layers; None where nothing is dropped."""
    layers = [layer for layer in adapted_layers(decoder) if isinstance(layer, LoRALinear)]
    if not any(settings.lora_dropout for layer in layers for settings in layer.settings.values()):
        return None
    masks = Masks([layer.path for layer in layers], device)
    for layer, key_5 in zip(layers, masks.words_K5, strict=True):
        layer.mask_key_5 = key_5
    return masks


def check_finite(decoder: nn.Module, adapter: str = DEFAULT) -> None:
    """ModelError if an adapter holds NaN or infinity."""
    for layer in adapted_layers(decoder):
        for name, parameter in layer.own_parameters(adapter).items():
            if not bool(torch.isfinite(parameter).all()):
                raise ModelError(
                    f"adapter {adapter}: {layer.path}.{name} holds NaN or infinity",
                    "use an earlier checkpoint",
                )
