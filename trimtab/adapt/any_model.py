"""Quantized layers and LoRA on any torch model, layer by layer; trimtab's own decoders use `quantize_layout` and
`add_adapters`, which also check names and sizes against the model's shape."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from trimtab.adapt.lora_layers import LoRALinear
from trimtab.adapt.quantized import QuantizedLinear
from trimtab.adapt.spec import DEFAULT, LoraSettings
from trimtab.facts.errors import ModelError, RecipeError
from trimtab.kernels.triton_support import runs_triton

HEAD = ("lm_head",)
"""Output heads are not changed by default: their quantization error would be added to the logits directly."""


def quantize_linears(model: nn.Module, kind: str = "nf4", *, skip: Sequence[str] = HEAD) -> nn.Module:
    """Replaces every `nn.Linear` by a quantized layer of the same name, in place; its weight is frozen.

    Args:
        model: any torch model with its weights.
        kind: "nf4" or "int8".
        skip: layers to leave unchanged, by path or its last component.

    Example:
        >>> import torch
        >>> model = quantize_linears(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)))
        >>> type(model[0]).__name__, model(torch.ones(2, 64)).shape
        ('QuantizedLinear', torch.Size([2, 4]))
    """
    found = _layers(model, (nn.Linear,), skip=skip)
    if not found:
        raise ModelError("the model has no linear layer to quantize", "change skip, or use another model")
    for name, layer in found:
        assert isinstance(layer, nn.Linear)
        device = layer.weight.device
        made = QuantizedLinear(
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            kind=kind,
            dtype=layer.weight.dtype,
            impl="triton" if runs_triton(device) else "reference",
            device=device,
        )
        made.set_weight(layer.weight.detach())
        if made.bias is not None:
            made.bias.data.copy_(layer.bias.detach())
        _set_module(model, name, made.train(layer.training))
    return model


def add_lora(
    model: nn.Module,
    settings: LoraSettings | None = None,
    *,
    skip: Sequence[str] = HEAD,
    adapter: str = DEFAULT,
    seed: int = 0,
) -> nn.Module:
    """Adds a LoRA adapter to linear and quantized layers, in place: active and trainable; everything else is frozen.

    Args:
        model: any torch model.
        settings: rank, alpha, DoRA; `target_modules` are last components of layers' names, or "all-linear".
        skip: layers to leave unchanged, by path or its last component.
        adapter: its name.
        seed: seed of the initial weights.

    Example:
        >>> model = add_lora(nn.Sequential(nn.Linear(8, 8)), LoraSettings(r=2))
        >>> [name for name, p in model.named_parameters() if p.requires_grad]
        ['0.lora_A.default.weight', '0.lora_B.default.weight']
    """
    settings = settings or LoraSettings()
    for key in ("lora_dropout", "rank_pattern", "alpha_pattern", "modules_to_save"):
        if getattr(settings, key):
            raise RecipeError(
                f"{key} requires a trimtab decoder", "omit it, or use trimtab.load and add_adapters"
            )
    wanted = settings.target_modules
    names = None if isinstance(wanted, str) else set(wanted)
    found = [
        (name, layer)
        for name, layer in _layers(model, (nn.Linear, QuantizedLinear, LoRALinear), skip=skip)
        if names is None or name.rpartition(".")[2] in names
    ]
    if not found:
        raise ModelError(
            f"the model has no layer for target_modules {wanted!r}", "name linear layers of the model"
        )
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for name, layer in found:
        adapted = layer if isinstance(layer, LoRALinear) else LoRALinear(layer, name).train(layer.training)
        adapted.add(
            adapter, settings, r=settings.r, scaling=settings.scaling(settings.r, settings.lora_alpha)
        )
        adapted.reset(adapter, seed)
        adapted.active = (adapter,)
        for parameter in adapted.own_parameters(adapter).values():
            parameter.requires_grad_(True)
        _set_module(model, name, adapted)
    return model


def _layers(
    model: nn.Module, kinds: tuple[type[nn.Module], ...], *, skip: Sequence[str]
) -> list[tuple[str, nn.Module]]:
    return [
        (name, layer)
        for name, layer in model.named_modules()
        if name and isinstance(layer, kinds) and name not in skip and name.rpartition(".")[2] not in skip
    ]


def _set_module(model: nn.Module, name: str, layer: nn.Module) -> None:
    above, _, last = name.rpartition(".")
    setattr(model.get_submodule(above), last, layer)
