"""Replaces a model's linear layers by the quantized layers of its configuration, on the meta device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch

from trimtab.adapt import quantize_layout, set_dequantized_copies, spec_quantized
from trimtab.adapt.quantized import quantized_layers
from trimtab.adapt.spec_quantized import Quantization
from trimtab.facts.devices import HOST_RESERVE, host_memory
from trimtab.facts.errors import RecipeError
from trimtab.facts.units import format_bytes
from trimtab.kernels.triton_support import runs_triton
from trimtab.model.building import torch_dtype
from trimtab.model.decoder import Decoder
from trimtab.model.weights import packed_names, stored_quantization


def quantize_linear_layers(
    decoder: Decoder, quantization: Quantization | None, weights: Path | None, device: torch.device | str
) -> None:
    """Replaces a decoder's linear layers by quantized ones; does nothing without quantization.

    Args:
        decoder: on the meta device.
        quantization: the resolved quantization.
        weights: the source of the weights, None for random ones. Files that are already quantized must match.
        device: where the weights will be allocated.
    """
    if quantization is None:
        return
    kind, double, block = quantization.kind, quantization.double, quantization.block_size
    stored = None if weights is None else stored_quantization(weights)
    if stored is not None:
        _check_stored(stored.kind, stored.double, kind, double, weights)
        block = stored.block
    quantize_layout(
        decoder,
        kind,
        block=block,
        double=double,
        dtype=torch_dtype(quantization.dtype),
        impl=quantization.impl,
        device=device,
    )
    if stored is not None and weights is not None:
        _check_all_stored(decoder, weights)


def _check_all_stored(decoder: Decoder, weights: Path) -> None:
    """Raises RecipeError for files with both quantized and unquantized layers in the blocks."""
    there = packed_names(weights)
    plain = [name for name, _ in quantized_layers(decoder) if f"{name}.weight" not in there]
    if plain:
        words = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in plain))
        raise RecipeError(
            f"{weights} has quantized layers and {len(plain)} unquantized ones ({words}), which is not supported",
            "give the model's unquantized weights, or leave load_in_4bit and load_in_8bit out",
        )


def _check_stored(
    stored_kind: str, stored_double: bool, kind: str, double: bool, weights: Path | None
) -> None:
    keys = {"nf4": "load_in_4bit", "int8": "load_in_8bit"}
    if stored_kind != kind:
        raise RecipeError(
            f"{weights} contains {stored_kind} weights, and {keys[kind]} requires {kind}",
            f"set {keys[stored_kind]}: true instead, or give the model's unquantized weights",
        )
    if stored_double != double:
        raise RecipeError(
            f"{weights} contains weights with {'8' if stored_double else '32'}-bit scales",
            f"set bnb_4bit_use_double_quant: {str(stored_double).lower()}",
        )


def quantization_for_device(quantization: Quantization | None, device: torch.device) -> Quantization | None:
    """Returns a run's quantization with the kernel implementation for this device; the packed weights do not change."""
    if quantization is None:
        return None
    impl = spec_quantized.choose_quantized_kernels(device=device.type, triton=runs_triton(device)).impl
    return dataclasses.replace(quantization, impl=impl)


def dequantize_for_cpu(decoder: Decoder, on_event: Callable[[str], None]) -> None:
    """Dequantizes a model's packed weights once if they are on a CPU, instead of for each token.

    The copies, in the compute dtype, are kept in memory next to the packed weights if there is enough free memory. A
    message reports either case. Does nothing for other models, or if the copies exist.
    """
    weight = decoder.model.embed_tokens.weight
    layers = [layer for _, layer in quantized_layers(decoder)]
    if not layers or weight.device.type != "cpu" or layers[0].dequantized_copy is not None:
        return
    needed = weight.element_size() * sum(layer.in_features * layer.out_features for layer in layers)
    free = host_memory()[1]
    kind = {"nf4": "4-bit", "int8": "8-bit"}[layers[0].kind]
    if needed > free - min(free // 5, HOST_RESERVE):
        on_event(
            f"{kind} weights are dequantized for each token, which is slow: dequantized copies would need "
            f"{format_bytes(needed)} of memory, and {format_bytes(free)} are free"
        )
        return
    on_event(f"{kind} weights are dequantized once; the copies need {format_bytes(needed)} of memory")
    set_dequantized_copies(decoder, decoder.shape.num_layers, dtype=weight.dtype)
