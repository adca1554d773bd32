"""SmolLM3: Llama with every fourth layer without RoPE."""

from __future__ import annotations

import dataclasses

from trimtab.facts.blocks import BlockShape
from trimtab.facts.errors import ModelError
from trimtab.facts.shapes import ModelShape
from trimtab.model.families.config_json import ConfigValues
from trimtab.model.families.plan_only import base


def _describe(config: ConfigValues) -> ModelShape:
    bias = config.flag("attention_bias")
    attention = base.read_attention(config, qkv_bias=bias, o_bias=bias)
    feed_forward = base.read_feed_forward(config, bias=config.flag("mlp_bias"))
    norm = base.read_norm(config)
    window = base.read_window(config) if config.flag("use_sliding_window") else None
    rotated = BlockShape(attention, feed_forward, norm)
    plain = BlockShape(dataclasses.replace(attention, rope=None, window=window), feed_forward, norm)
    return base.assemble(config, [rotated if has_rope else plain for has_rope in _rotated_layers(config)])


def _rotated_layers(config: ConfigValues) -> list[int]:
    """Whether each layer has RoPE: `no_rope_layers` is 1 for those that do."""
    num_layers = config.num_layers
    interval = config.integer("no_rope_layer_interval", 4, least=1)
    stated = config.get("no_rope_layers")
    if stated is None:
        return [int((layer + 1) % interval != 0) for layer in range(num_layers)]
    if not isinstance(stated, list) or len(stated) != num_layers or not set(stated) <= {0, 1}:
        raise ModelError(
            f"{config.where}: no_rope_layers must have 0 or 1 for each of {num_layers} layers",
            base.DOWNLOAD_AGAIN,
        )
    return stated


FAMILY = base.PlanOnlyFamily(
    "smollm3",
    _describe,
    gguf_architecture="smollm3",
    defaults={"max_position_embeddings": 32_768, "num_key_value_heads": 4, "tie_word_embeddings": True},
)
