"""A run's frozen weights in few bits, as resolved for the run: laid out on meta, alike the files they come from."""

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
from trimtab.model.weights import packed_names, stored_packing


def quantize_linear_layers(
    decoder: Decoder, quantization: Quantization | None, weights: Path | None, device: torch.device | str
) -> None:
    """Replaces a decoder's linear layers, on meta, by the quantized ones that a run chose, if it did.

    Args:
        decoder: without memory yet.
        quantization: as the run resolved it.
        weights: where they will be read from, None for fresh ones. Files that are quantized already must be so alike.
        device: where they will lie.
    """
    if quantization is None:
        return
    kind, double, block = quantization.kind, quantization.double, quantization.block_size
    stored = None if weights is None else stored_packing(weights)
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
    """RecipeError for files that keep some layers of the blocks in 16 bits beside quantized ones."""
    there = packed_names(weights)
    plain = [name for name, _ in quantized_layers(decoder) if f"{name}.weight" not in there]
    if plain:
        words = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in plain))
        raise RecipeError(
            f"{weights} keeps {words} unquantized in {len(plain)} places beside quantized layers, which a run cannot",
            "give the model's unquantized weights, or leave load_in_4bit and load_in_8bit out",
        )


def _check_stored(
    stored_kind: str, stored_double: bool, kind: str, double: bool, weights: Path | None
) -> None:
    keys = {"nf4": "load_in_4bit", "int8": "load_in_8bit"}
    if stored_kind != kind:
        raise RecipeError(
            f"{weights} holds weights in {stored_kind}, and {keys[kind]} asks for {kind}",
            f"set {keys[stored_kind]}: true instead, or give the model's unquantized weights",
        )
    if stored_double != double:
        raise RecipeError(
            f"{weights} holds weights whose scales are in {'8' if stored_double else '32'} bits",
            f"set bnb_4bit_use_double_quant: {str(stored_double).lower()}",
        )


def requantized(quantization: Quantization | None, device: torch.device) -> Quantization | None:
    """A run's choice on this machine's device: the same bytes, read by the code that runs here."""
    if quantization is None:
        return None
    impl = spec_quantized.choose_quantized_kernels(device=device.type, triton=runs_triton(device)).impl
    return dataclasses.replace(quantization, impl=impl)


def dequantize_for_cpu(decoder: Decoder, on_event: Callable[[str], None]) -> None:
    """Dequantizes a model's packed weights once, if they lie on a CPU, where each token would do so again.

    Copies in the format of the products are kept beside the packed weights where the memory for them is free; either
    way a line says so. Does nothing for other models, and nothing a second time.
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
            f"{kind} weights are dequantized for each token, which is slow: copies of them would take "
            f"{format_bytes(needed)}, and {format_bytes(free)} of memory are free"
        )
        return
    on_event(f"{kind} weights are dequantized once, which takes {format_bytes(needed)} of memory")
    set_dequantized_copies(decoder, decoder.shape.num_layers, dtype=weight.dtype)
