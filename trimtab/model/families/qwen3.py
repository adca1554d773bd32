"""Qwen3: an RMSNorm on each head's q and k, no biases unless the config sets them."""

from __future__ import annotations

from typing import Any

from trimtab.facts.shapes import ModelShape
from trimtab.model.families import base
from trimtab.model.families.config_json import ConfigValues, decoder_shape
from trimtab.model.families.qwen2 import read_windows, window_keys


def _describe(config: ConfigValues) -> ModelShape:
    bias = config.flag("attention_bias")
    return decoder_shape(config, qkv_bias=bias, o_bias=bias, qk_norm="head", windows=read_windows(config))


def _own_keys(shape: ModelShape) -> dict[str, Any]:
    return {**window_keys(shape), "attention_bias": shape.attention.qkv_bias}


FAMILY = base.Family(
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    describe=_describe,
    own_keys=_own_keys,
    defaults={
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "head_dim": 128,
    },
    gguf_layer={**base.LAYER, **base.QK_NORM, **base.QKV_BIAS, **base.O_BIAS},
    gguf_pairs_rotary_rows=False,
    gguf_architecture="qwen3",
)
