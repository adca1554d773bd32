"""Models that were saved in 4 or 8 bits: damaged files, and recipes that ask for another format than theirs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch
from cases import World, case, settings
from safetensors.torch import load_file, save_file
from shared import decoder_of

from trimtab.adapt import quantize_layout
from trimtab.adapt.quantized import nf4_weight, quantized_layers
from trimtab.model import build, load_weights, read_shape

WEIGHTS = "model.safetensors"
Q = "model.layers.0.self_attn.q_proj"


def loaded(folder: Path, kind: str = "nf4", **options: bool) -> None:
    """Into a model whose parameters are allocated in a quantized format."""
    decoder = build(read_shape(folder), dtype="fp32", device="meta", attention="reference")
    quantize_layout(decoder, kind, device="cpu", **options)
    load_weights(decoder.to_empty(device="cpu"), folder)


def damaged(key: str, kind: str, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """A file that is complete again after it was fetched again."""

    def provoke(w: World) -> None:
        folder = w.own(kind)
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file(tensors, folder / WEIGHTS)
        decoder_of(folder)

    def follow(w: World, remedy: str) -> None:
        decoder_of(w.again(kind))
        loaded(w.own(kind), kind)

    case(f"model/{key}", provoke, follow)


STATE = f"{Q}.weight.quant_state.bitsandbytes__nf4"
damaged(
    "weights_packed.py:check_metadata_size: download the file again",
    "nf4",
    lambda tensors: tensors.update({STATE: torch.zeros(10**5, dtype=torch.uint8)}),
)
damaged("weights_packed.py:_read_stored: {}", "nf4", lambda tensors: tensors[f"{Q}.weight.quant_map"].zero_())
AGAIN = "weights_packed.py:_read_stored: download it again"
damaged(AGAIN, "int8", lambda tensors: tensors.update({f"{Q}.weight": tensors[f"{Q}.weight"].float()}))
damaged(AGAIN, "int8", lambda tensors: tensors.update({f"{Q}.SCB": tensors[f"{Q}.SCB"].half()}))
damaged(
    "weights_packed.py:_read_stored: save it again with a newer bitsandbytes",
    "int8",
    lambda tensors: tensors.update({f"{Q}.weight_format": torch.tensor(2, dtype=torch.uint8)}),
)
DAMAGED = "the weights are damaged; download them again"
damaged(f"weights_packed.py:_check_scales: {DAMAGED}", "int8", lambda tensors: tensors[f"{Q}.SCB"].neg_())
damaged(
    f"weights_packed.py:_check_finite: {DAMAGED}",
    "int8",
    lambda tensors: tensors[f"{Q}.SCB"].fill_(float("nan")),
)
damaged(
    "weights_safetensors.py:_packed_dims: complete the download", "nf4", lambda tensors: tensors.pop(STATE)
)
damaged(
    "weights_safetensors.py:_declared: complete the download",
    "int8",
    lambda tensors: tensors.pop(f"{Q}.weight"),
)


# Another format than the files'.
PACKING = "adapt/quantized.py:QuantizedLinear._check_layout: quantize the original weights again, or "
case(
    f"{PACKING}quantize the model as in its files",
    lambda w: loaded(w.shared("nf4"), "nf4", double=False),
    lambda w, remedy: (loaded(w.shared("wide"), "nf4", double=False), loaded(w.shared("nf4"), "nf4")),
)
case(
    "model/weights.py:WeightDestinations._copy_packed: {}",
    lambda w: loaded(w.shared("nf4"), "int8"),
    lambda w, remedy: (loaded(w.shared("wide"), "int8"), loaded(w.shared("nf4"), "nf4")),
)


def poisoned(w: World) -> Path:
    folder = w.own("wide")
    tensors = load_file(folder / WEIGHTS)
    tensors[f"{Q}.weight"][0, 0] = float("nan")
    save_file(tensors, folder / WEIGHTS)
    return folder


case(
    "model/weights.py:WeightDestinations.copy: {}",
    lambda w: loaded(poisoned(w)),
    lambda w, remedy: (loaded(w.shared("wide")), "again" in remedy or None),
)


def train(w: World, model: str, *overrides: str) -> str:
    return w.train(*overrides, model=str(w.shared(model)), lora={"r": 2}, max_steps=1)


case(
    "run/quantizing.py:_check_stored: set {}: true instead, or give the model's unquantized weights",
    lambda w: train(w, "nf4", "load_in_8bit=true"),
    lambda w, remedy: (train(w, "nf4", *settings(remedy)[0]), train(w, "wide", "load_in_8bit=true")),
)
case(
    "run/quantizing.py:_check_stored: set bnb_4bit_use_double_quant: {}",
    lambda w: train(w, "nf4", "load_in_4bit=true", "bnb_4bit_use_double_quant=false"),
    lambda w, remedy: train(w, "nf4", "load_in_4bit=true", *settings(remedy)[0]),
)


def partly(w: World, *overrides: str) -> str:
    """Files that keep one layer in 32 bits."""
    folder = w.own("nf4")
    tensors = load_file(folder / WEIGHTS)
    plain = load_file(w.shared("wide") / WEIGHTS)[f"{Q}.weight"]
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{Q}.weight")}
    save_file({**tensors, f"{Q}.weight": plain}, folder / WEIGHTS)
    return w.train(*overrides, model=str(folder), lora={"r": 2}, max_steps=1)


case(
    "run/quantizing.py:_check_all_stored: give the model's unquantized weights, or leave load_in_4bit and load_in_8bit "
    "out",
    lambda w: partly(w, "load_in_4bit=true"),
    lambda w, remedy: (train(w, "wide", "load_in_4bit=true"), partly(w)),
)


# Scales of scales in blocks of another size than bitsandbytes' default.
def other_nested_block(w: World) -> None:
    decoder = quantize_layout(decoder_of(w.shared("wide")), "nf4", double=True)
    _, layer = next(iter(quantized_layers(decoder)))
    weight = nf4_weight(layer)
    layer.set_packed_weight(dataclasses.replace(weight, nested_block=weight.nested_block // 2))


case(
    "adapt/quantized.py:QuantizedLinear._check_layout: quantize the original weights again, or omit load_in_4bit: the "
    "weights are then loaded dequantized",
    other_nested_block,
    lambda w, remedy: (
        quantize_layout(decoder_of(w.shared("wide")), "nf4", double=True),
        decoder_of(w.shared("nf4")),
    ),
)
