"""Replaces a decoder's linear layers by quantized ones, before parameters are allocated.

    decoder = build(shape, dtype="bf16", device="meta", attention="varlen")
    quantize_layout(decoder, "nf4", device="cuda")          # allocates nothing
    decoder.to_empty(device="cuda")                         # 4.13 bits per parameter
    load_weights(decoder, "my-model")                       # reads, moves and quantizes one weight at a time

The layers keep their names; embeddings, norms and the head are unchanged.
"""

from __future__ import annotations

import torch
from torch import nn

from trimtab.adapt import spec_quantized
from trimtab.adapt.packed_layout import check_rows
from trimtab.adapt.quantized import QuantizedLinear, quantized_layers
from trimtab.facts.errors import RecipeError
from trimtab.kernels.triton_support import runs_triton
from trimtab.model.decoder import Decoder


def quantize_layout(
    decoder: Decoder,
    kind: str,
    *,
    block: int = spec_quantized.BLOCK,
    double: bool = True,
    skip: tuple[str, ...] = spec_quantized.NEVER,
    dtype: torch.dtype | None = None,
    impl: str = "auto",
    device: torch.device | str | None = None,
) -> Decoder:
    """Replaces the blocks' linear layers by quantized ones of the same names, in place.

    On the meta device the new layers are empty: materialize them (`to_empty`) and load weights (`load_weights`). The
    weights of a materialized decoder are quantized here, one at a time.

    Args:
        decoder: from `build`.
        kind: "nf4" or "int8".
        block: NF4: number of elements that share a scale.
        double: NF4: double quantization, 4.13 bits per parameter instead of 4.5.
        skip: layers not to quantize, by path or its last component (`"down_proj"`). The head is never quantized.
        dtype: dtype that weights are rounded to before they are quantized; by default the decoder's. Set it to the
            dtype of training to get the same codes if the model is used in another dtype.
        impl: "auto" selects by device, once; the choice is stored in each layer (`layer.impl`).
        device: device of the weights; by default the decoder's.

    Example:
        >>> from trimtab.facts.shapes import uniform_shape
        >>> from trimtab.model import build, init_weights
        >>> tiny = uniform_shape("llama", 64, 16, 32, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=4)
        >>> decoder = build(tiny, dtype="fp32", device="meta", attention="reference")
        >>> decoder = quantize_layout(decoder, "nf4", device="cpu").to_empty(device="cpu")
        >>> describe(init_weights(decoder, seed=0))
        '7 linear layers in nf4 (blocks of 64, scales in 8 bits), read by reference'
    """
    where = torch.device(device) if device is not None else decoder.model.embed_tokens.weight.device
    assert where.type != "meta", "pass the device of the weights: device="
    chosen = spec_quantized.choose_quantized_kernels(
        device=where.type, triton=runs_triton(where), requested=impl
    ).impl
    for name, linear in _linears(decoder, (*skip, *spec_quantized.NEVER)):
        layer = QuantizedLinear(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            kind=kind,
            dtype=dtype or linear.weight.dtype,
            bias_dtype=linear.weight.dtype,
            block=block,
            double=double,
            impl=chosen,
            device=linear.weight.device,
        )
        if not linear.weight.is_meta:
            _set_weight(layer, linear)
        decoder.set_submodule(name, layer)
    return decoder


def _set_weight(layer: QuantizedLinear, linear: nn.Linear) -> None:
    layer.set_weight(linear.weight)
    if layer.bias is not None:
        layer.bias.data.copy_(linear.bias.data)


def _linears(decoder: Decoder, skip: tuple[str, ...]) -> list[tuple[str, nn.Linear]]:
    for name, module in decoder.named_modules():
        if isinstance(module, QuantizedLinear) or "base" in module.__dict__:
            raise RecipeError(
                f"{name} is already quantized or has an adapter", "quantize a plain model, then add adapters"
            )
    found = [(name, module) for name, module in decoder.named_modules() if type(module) is nn.Linear]
    last_words = {name.rpartition(".")[2] for name, _ in found}
    known = last_words | {name for name, _ in found} | set(spec_quantized.NEVER)
    if unknown := [name for name in skip if name not in known]:
        raise RecipeError(
            f"skip names {unknown[0]!r}, which is not a linear layer",
            f"the model has {', '.join(sorted(last_words))}",
        )
    return [(name, module) for name, module in found if not spec_quantized.skipped(name, skip)]


def describe(decoder: nn.Module) -> str:
    """Returns a one-line description of the quantized layers, for the run's printed choices."""
    layers = [layer for _, layer in quantized_layers(decoder)]
    if not layers:
        return "no quantized layers"
    first = layers[0].packed_layout
    scales = ""
    if first.kind == "nf4":
        scales = f" (blocks of {first.block}, scales in {'8' if first.nested_block else '32'} bits)"
    return f"{len(layers)} linear layers in {first.kind}{scales}, read by {first.impl}"


def check_row_layout(decoder: nn.Module) -> None:
    """Raises RecipeError for the first quantized layer whose rows cannot be sliced, as sharding requires."""
    for name, layer in quantized_layers(decoder):
        check_rows(layer.packed_layout, name)
