"""Llama 2 and 3.x, and models with the same architecture: SmolLM2, TinyLlama, Mistral's GGUF files."""

from __future__ import annotations

from typing import Any

from trimtab.facts.shapes import ModelShape
from trimtab.model.families import base
from trimtab.model.families.config_json import ConfigValues, decoder_shape


def _describe(config: ConfigValues) -> ModelShape:
    bias = config.flag("attention_bias")
    return decoder_shape(config, qkv_bias=bias, o_bias=bias, mlp_bias=config.flag("mlp_bias"))


def _own_keys(shape: ModelShape) -> dict[str, Any]:
    return {"attention_bias": shape.attention.qkv_bias, "mlp_bias": shape.block.dense.bias}


FAMILY = base.Family(
    name="llama",
    architecture="LlamaForCausalLM",
    describe=_describe,
    own_keys=_own_keys,
    defaults={"max_position_embeddings": 2048},
    # The tensor-parallel degree of pretraining, and keys that SmolLM2's files have.
    harmless=frozenset({"pretraining_tp", "is_llama_config", "transformers.js_config"}),
    gguf_layer={**base.LAYER, **base.QKV_BIAS, **base.O_BIAS, **base.MLP_BIAS},
    gguf_pairs_rotary_rows=True,
    gguf_architecture="llama",
)
