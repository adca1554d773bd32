"""Mixtral: Mistral with experts in every layer."""

from __future__ import annotations

from trimtab.facts.blocks import BlockShape, ExpertsShape
from trimtab.facts.shapes import ModelShape
from trimtab.model.families.config_json import ConfigValues
from trimtab.model.families.plan_only import base


def _describe(config: ConfigValues) -> ModelShape:
    attention = base.read_attention(config, window=base.read_window(config))
    count, active = base.read_experts(config, "num_local_experts")
    experts = ExpertsShape(count, active, config.integer("intermediate_size", least=1))
    block = BlockShape(attention, experts, base.read_norm(config))
    return base.assemble(config, [block] * config.num_layers)


FAMILY = base.PlanOnlyFamily(
    "mixtral",
    _describe,
    gguf_architecture="llama",
    gguf_keys={"expert_count": "num_local_experts"},
    defaults={
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
    },
)
