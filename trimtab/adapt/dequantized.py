"""Dequantized copies of quantized frozen weights, if memory allows: they avoid repeated dequantization.

    load_weights(decoder, "my-model")                             # packed
    set_dequantized_copies(decoder, 32, dtype=torch.bfloat16)      # plus dequantized copies for 32 blocks

A packed weight is dequantized in the forward pass, in the backward pass, and once more if the layer is recomputed. A
copy is dequantized once and read instead: 16 bits per element in addition to the 4 or 8. The products are the same, on
the same values, so results are bitwise identical. Saving, merging and exporting still read the packed tensors.
"""

from __future__ import annotations

import torch

from trimtab.adapt.quantized import quantized_layers
from trimtab.facts.errors import RecipeError
from trimtab.model.decoder import Decoder


def set_dequantized_copies(decoder: Decoder, layers: int, *, dtype: torch.dtype | None = None) -> Decoder:
    """Adds dequantized copies of the first `layers` blocks' weights; removes those of the others.

    Call it after the weights are loaded and before the first step, so that no step allocates the memory.

    Args:
        decoder: with quantized layers, adapters on them or not.
        layers: number of blocks; 0 removes all copies.
        dtype: the compute dtype, for which the copies are used; by default each weight's dtype before quantization.

    Example:
        >>> from trimtab.adapt import quantize_layout
        >>> from trimtab.facts.shapes import uniform_shape
        >>> from trimtab.model import build, init_weights
        >>> tiny = uniform_shape("llama", 64, 16, 32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4)
        >>> decoder = init_weights(build(tiny, dtype="fp32", device="cpu", attention="reference"), seed=0)
        >>> decoder = set_dequantized_copies(quantize_layout(decoder, "nf4"), 1)
        >>> [layer.dequantized_copy is not None for _, layer in quantized_layers(decoder)].count(True)
        7
    """
    blocks = list(decoder.model.layers)
    if not 0 <= layers <= len(blocks):
        raise RecipeError(
            f"cannot store dequantized copies of {layers} layers: the model has {len(blocks)}",
            f"give a number from 0 to {len(blocks)}",
        )
    if layers and not any(True for _ in quantized_layers(decoder)):
        raise RecipeError(
            "the model has no quantized weight, so no dequantized copies are possible",
            "quantize the model first: quantize_layout",
        )
    for index, block in enumerate(blocks):
        for _, layer in quantized_layers(block):
            layer.set_dequantized_copy((dtype or layer.dtype) if index < layers else None)
    return decoder
