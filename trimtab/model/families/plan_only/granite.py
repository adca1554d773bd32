"""Granite 3 and later dense models: Llama with multipliers on embeddings, residual branches, scores and logits."""

from __future__ import annotations

from trimtab.facts.blocks import BlockShape
from trimtab.facts.shapes import ModelShape
from trimtab.model.families.config_json import ConfigValues
from trimtab.model.families.plan_only import base


def _describe(config: ConfigValues) -> ModelShape:
    bias = config.flag("attention_bias")
    attention = base.read_attention(
        config, scale=config.number("attention_multiplier", 1.0), qkv_bias=bias, o_bias=bias
    )
    feed_forward = base.read_feed_forward(config, bias=config.flag("mlp_bias"))
    block = BlockShape(attention, feed_forward, base.read_norm(config))
    return base.assemble(config, [block] * config.num_layers)


FAMILY = base.PlanOnlyFamily(
    "granite",
    _describe,
    gguf_architecture="granite",
    gguf_keys={"attention.scale": "attention_multiplier"},
    defaults={"max_position_embeddings": 2048},
)
