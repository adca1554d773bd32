"""A test family with fused qkv and gate-up weights, as in Phi-3, which trimtab does not support."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from trimtab.facts.shapes import ModelShape
from trimtab.model import build, load_weights, read_shape
from trimtab.model.decoder import Decoder
from trimtab.model.families import FAMILIES, base
from trimtab.model.families.config_json import ConfigValues, decoder_shape

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "initializer_range": 0.2,  # large, so that attention is far from uniform and mistakes show
}


def _describe(config: ConfigValues) -> ModelShape:
    window = config.get("sliding_window")
    return decoder_shape(config, windows=[window] * config.num_layers, fused_qkv=True, fused_gate_up=True)


FAMILY = base.Family(
    name="phi3",
    architecture="Phi3ForCausalLM",
    describe=_describe,
    own_keys=lambda shape: {"sliding_window": shape.window(0), "pad_token_id": None},
    defaults={"max_position_embeddings": 4096},
    gguf_layer={
        **{
            name: stored
            for name, stored in base.LAYER.items()
            if not name.endswith(("q_proj.weight", "k_proj.weight"))
        },
        "self_attn.qkv_proj.weight": "attn_qkv.weight",
        "mlp.gate_up_proj.weight": "ffn_up.weight",
    },
    gguf_pairs_rotary_rows=False,
)


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the family for one test."""
    monkeypatch.setitem(FAMILIES, FAMILY.name, FAMILY)


def phi3_model(**settings: Any) -> Any:
    """transformers' tiny random Phi-3 in fp32, norms random too."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Phi3Config(**{**TINY, **settings})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
    return model.eval()


def load(folder: Path, **options: Any) -> Decoder:
    """Load the decoder of a folder."""
    decoder = build(
        read_shape(folder), **{"dtype": "fp32", "device": "cpu", "attention": "reference", **options}
    )
    load_weights(decoder, folder)
    return decoder


def fused(shape: ModelShape) -> ModelShape:
    """Build the same model with fused matrices."""
    blocks = tuple(
        dataclasses.replace(
            block,
            mixer=dataclasses.replace(block.attention, fused_qkv=True),
            feed_forward=dataclasses.replace(block.dense, fused_gate_up=True),
        )
        for block in shape.blocks
    )
    return dataclasses.replace(shape, family=FAMILY.name, blocks=blocks)


STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def stacked(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Compute a fused tensor from the separate ones."""
    for last, parts in STACKED.items():
        if f".{last}." in name:
            return torch.cat([tensors[name.replace(last, part)] for part in parts])
    return tensors[name]


@torch.no_grad()
def copy_stacked(source: Decoder, decoder: Decoder) -> Decoder:
    """Copy the weights of a decoder with separate matrices to one with fused ones."""
    found = dict(source.named_parameters())
    for name, parameter in decoder.named_parameters():
        parameter.copy_(stacked(found, name))
    return decoder
