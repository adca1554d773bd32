"""Gemma (the first) and CodeGemma: Llama with wide heads, norms with an offset and a head tied to the embedding."""

from __future__ import annotations

from trimtab.facts.blocks import BlockShape
from trimtab.facts.shapes import ModelShape
from trimtab.model.families.config_json import ConfigValues
from trimtab.model.families.plan_only import base


def _describe(config: ConfigValues) -> ModelShape:
    bias = config.flag("attention_bias")
    attention = base.read_attention(config, qkv_bias=bias, o_bias=bias)
    norm = base.read_norm(config, unit_offset=True)
    return base.assemble(
        config, [BlockShape(attention, base.read_feed_forward(config), norm)] * config.num_layers
    )


FAMILY = base.PlanOnlyFamily(
    "gemma",
    _describe,
    gguf_architecture="gemma",
    defaults={
        "max_position_embeddings": 8192,
        "num_key_value_heads": 16,
        "head_dim": 256,
        # Published configs have "gelu", but transformers has always used the tanh approximation.
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
)
