"""Merges adapters into their base weights: W ← W + s·B·A, or with DoRA m ⊙ (W + s·B·A) / ‖W + s·B·A‖."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from trimtab.adapt.lora import LoRAEmbedding, LoRALinear, active_adapters, adapted_layers
from trimtab.adapt.quantized import QuantizedLinear
from trimtab.adapt.saved_modules import discard_stored_modules, replaced_modules
from trimtab.facts.errors import ModelError, RecipeError
from trimtab.model.building import torch_dtype
from trimtab.model.decoder import Decoder


@dataclass(frozen=True)
class MergeResult:
    """The result of a merge."""

    layers: int
    changed: int
    """Elements that differ from the base's in the requested dtype."""
    elements: int
    """All elements of the adapted or replaced layers."""


@torch.no_grad()
def merged_weight(layer: LoRALinear | LoRAEmbedding) -> torch.Tensor:
    """A layer's weight merged with its active adapters, computed in fp32 or wider."""
    kept = layer._parameters.get("weight")
    wide = torch.promote_types(torch.float32 if kept is None else kept.dtype, torch.float32)
    weight = layer.dense_weight(wide)
    for adapter in layer.active:
        weight = weight + layer.delta(adapter).to(weight.device, wide)
        if isinstance(layer, LoRALinear) and adapter in layer.lora_magnitude_vector:
            lengths = layer.magnitude(adapter).to(wide)
            weight = weight * (lengths / torch.linalg.vector_norm(weight, dim=1))[:, None]
    return weight


@torch.no_grad()
def merge_adapters(decoder: Decoder, *, dtype: str) -> MergeResult:
    """Replaces every adapted or quantized layer by a plain one with the merged weight, in place.

    Args:
        decoder: with the adapters to merge active.
        dtype: dtype of the saved model, in which the merged weights must differ from the base's.

    Raises:
        ModelError: a merged weight is not finite, or none differs from the base's in `dtype`; the model is unchanged.
    """
    if not active_adapters(decoder):
        raise RecipeError("there is no adapter to merge", "give a run trained with `lora`, or an adapter")
    layers = list(adapted_layers(decoder))
    changed, elements = _count_replaced(decoder, dtype)
    for layer in layers:
        merged = merged_weight(layer)
        base = layer.dense_weight(merged.dtype)
        stored = merged.to(torch_dtype(dtype))
        if not bool(torch.isfinite(stored).all()):
            raise ModelError(
                f"the merged {layer.path} "
                + (
                    f"overflows in {dtype}"
                    if bool(torch.isfinite(merged).all())
                    else "contains NaN or infinity"
                ),
                "nothing was written; use an earlier checkpoint, or --dtype fp32",
            )
        changed += int((stored != base.to(torch_dtype(dtype))).sum())
        elements += stored.numel()
    if not changed:
        raise ModelError(
            f"merging changes no weight in {dtype}: the adapter is untrained, or its changes are below the precision "
            f"of {dtype}",
            "nothing was written; train it further" + ("" if dtype == "fp32" else ", or give --dtype fp32"),
        )
    for layer in layers:
        _replace(decoder, layer.path, merged_weight(layer), layer.__dict__["base"])
    quantized = [
        (name, module) for name, module in decoder.named_modules() if isinstance(module, QuantizedLinear)
    ]
    for name, module in quantized:
        _replace(decoder, name, module.dequantized(torch.float32), module)
    discard_stored_modules(decoder)
    return MergeResult(len(layers), changed, elements)


def _count_replaced(decoder: Decoder, dtype: str) -> tuple[int, int]:
    """Counts elements of the modules that active adapters fully replace: (those that differ in a dtype, all)."""
    parameters, changed, elements = dict(decoder.named_parameters()), 0, 0
    for name, base in replaced_modules(decoder).items():
        now, before = (tensor.to(torch_dtype(dtype)) for tensor in (parameters[name].data, base))
        changed += int((now != before.to(now.device)).sum())
        elements += now.numel()
    return changed, elements


def _replace(decoder: Decoder, name: str, weight: torch.Tensor, base: nn.Module) -> None:
    """Replaces an adapted layer by a plain one with this weight."""
    plain: nn.Module
    with torch.device("meta"):
        if isinstance(base, nn.Embedding):
            plain = nn.Embedding(*weight.shape)
        else:
            plain = nn.Linear(weight.shape[1], weight.shape[0], bias=getattr(base, "bias", None) is not None)
    kept = base._parameters.get("weight")
    dtype = decoder.model.embed_tokens.weight.dtype if kept is None else kept.dtype
    plain.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
    bias = getattr(base, "bias", None)
    if bias is not None:
        plain.bias = nn.Parameter(bias.detach(), requires_grad=False)
    above, _, last = name.rpartition(".")
    setattr(decoder.get_submodule(above), last, plain)
