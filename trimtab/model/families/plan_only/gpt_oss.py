"""gpt-oss: experts with biases in every layer, attention sinks, every other layer with a sliding window."""

from __future__ import annotations

import dataclasses

from trimtab.facts.blocks import BlockShape, ExpertsShape
from trimtab.facts.shapes import ModelShape
from trimtab.model.families.config_json import ConfigValues
from trimtab.model.families.plan_only import base


def _describe(config: ConfigValues) -> ModelShape:
    bias = config.flag("attention_bias", True)
    attention = base.read_attention(config, sinks=True, qkv_bias=bias, o_bias=bias)
    count, active = base.read_experts(config, "num_local_experts")
    width = config.integer("intermediate_size", least=1)
    experts = ExpertsShape(count, active, width, bias=True, router_bias=True, fused_gate_up=True)
    full = BlockShape(attention, experts, base.read_norm(config))
    sliding = dataclasses.replace(full, mixer=dataclasses.replace(attention, window=base.read_window(config)))
    default = [base.FULL if layer % 2 else base.SLIDING for layer in range(config.num_layers)]
    kinds = base.read_layer_kinds(config, default)
    return base.assemble(config, [full if kind == base.FULL else sliding for kind in kinds])


FAMILY = base.PlanOnlyFamily(
    "gpt_oss",
    _describe,
    gguf_architecture="gpt-oss",
    gguf_keys={"expert_count": "num_local_experts", "expert_feed_forward_length": "intermediate_size"},
    defaults={
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "num_experts_per_tok": 4,
        "num_local_experts": 128,
        "rms_norm_eps": 1e-5,
    },
)
