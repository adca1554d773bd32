"""GLM-4-0414: norms before and after each sublayer, fused gate and up, interleaved RoPE on half of each head."""

from __future__ import annotations

from trimtab.facts.blocks import BlockShape
from trimtab.facts.shapes import ModelShape
from trimtab.model.families.config_json import ConfigValues
from trimtab.model.families.plan_only import base


def _describe(config: ConfigValues) -> ModelShape:
    rope = base.read_plan_only_rope(config, config.integer("head_dim", least=1), interleaved=True)
    attention = base.read_attention(config, rope, qkv_bias=config.flag("attention_bias", True))
    feed_forward = base.read_feed_forward(config, fused_gate_up=True)
    block = BlockShape(attention, feed_forward, base.read_norm(config), "both")
    return base.assemble(config, [block] * config.num_layers)


FAMILY = base.PlanOnlyFamily(
    "glm4",
    _describe,
    gguf_architecture="glm4",
    defaults={
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-07,
    },
)
