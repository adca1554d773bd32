"""Frozen weights in few bits that are kept unpacked as well, where memory is left: nothing is dequantized twice.

    load_weights(decoder, "my-model")                       # packed
    keep_unpacked(decoder, 32, dtype=torch.bfloat16)        # and, of 32 blocks, as the products read it

A packed weight is dequantized in the forward pass, in the backward pass, and once more where a layer is computed again.
A copy is made once and read instead: 16 bits a value besides the 4 or 8. The products are the same, on the same
numbers, and so is every bit that they give. Saving, merging and exporting read the packed tensors as before.
"""

from __future__ import annotations

import torch

from trimtab.adapt.quantized import quantized_layers
from trimtab.facts.errors import RecipeError
from trimtab.model.decoder import Decoder


def keep_unpacked(decoder: Decoder, layers: int, *, dtype: torch.dtype | None = None) -> Decoder:
    """Keeps the weights of the first so many blocks unpacked as well; those of the others no longer, if they were.

    After the weights are loaded and before the first step, so that no step is the one that takes the memory.

    Args:
        decoder: with quantized layers, adapters on them or not.
        layers: blocks; 0 gives all copies up.
        dtype: format of the products, in which the copies are used; by default each weight's before it was quantized.

    Example:
        >>> from trimtab.adapt import quantize_layout
        >>> from trimtab.facts.shapes import uniform_shape
        >>> from trimtab.model import build, init_weights
        >>> tiny = uniform_shape("llama", 64, 16, 32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4)
        >>> decoder = init_weights(build(tiny, dtype="fp32", device="cpu", attention="reference"), seed=0)
        >>> decoder = keep_unpacked(quantize_layout(decoder, "nf4"), 1)
        >>> [layer.unpacked is not None for _, layer in quantized_layers(decoder)].count(True)
        7
    """
    blocks = list(decoder.model.layers)
    if not 0 <= layers <= len(blocks):
        raise RecipeError(
            f"the weights of {layers} layers cannot be kept unpacked: the model has {len(blocks)}",
            f"give a number from 0 to {len(blocks)}",
        )
    if layers and not any(True for _ in quantized_layers(decoder)):
        raise RecipeError(
            "no weight of the model is packed, and none can be kept unpacked as well",
            "quantize the model first: quantize_layout",
        )
    for index, block in enumerate(blocks):
        for _, layer in quantized_layers(block):
            layer.keep_unpacked((dtype or layer.dtype) if index < layers else None)
    return decoder
