"""Phi-3, Phi-3.5 and Phi-4: fused q, k and v, fused gate and up, LongRoPE."""

from __future__ import annotations

from trimtab.facts.blocks import BlockShape
from trimtab.facts.shapes import ModelShape
from trimtab.model.families.config_json import ConfigValues
from trimtab.model.families.plan_only import base


def _describe(config: ConfigValues) -> ModelShape:
    attention = base.read_attention(config, window=base.read_window(config), fused_qkv=True)
    feed_forward = base.read_feed_forward(config, fused_gate_up=True)
    block = BlockShape(attention, feed_forward, base.read_norm(config))
    return base.assemble(config, [block] * config.num_layers)


FAMILY = base.PlanOnlyFamily(
    "phi3",
    _describe,
    gguf_architecture="phi3",
    defaults={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
)
