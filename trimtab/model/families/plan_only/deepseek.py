"""DeepSeek-V2 and -V3: latent attention, and routed and shared experts after the first dense layers.

The layer that predicts a second token (V3's multi-token prediction) is not included, as in transformers.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

from trimtab.facts.blocks import BlockShape, ExpertsShape, LatentAttentionShape
from trimtab.facts.errors import ModelError
from trimtab.facts.shapes import ModelShape
from trimtab.model.families.config_json import ConfigValues
from trimtab.model.families.plan_only import base


def _describe(config: ConfigValues, score: Literal["softmax", "sigmoid"]) -> ModelShape:
    if config.flag("attention_bias") or config.flag("mlp_bias"):
        raise ModelError(
            f"{config.where}: attention_bias or mlp_bias is true",
            "plan a model of this family without biases, as all published ones have none",
        )
    attention, norm = _attention(config), base.read_norm(config)
    count, active = base.read_experts(config, "n_routed_experts")
    experts = ExpertsShape(
        count,
        active,
        config.integer("moe_intermediate_size", least=1),
        shared=config.integer("n_shared_experts", 0),
        score=score,
    )
    dense = BlockShape(attention, base.read_feed_forward(config), norm)
    sparse = BlockShape(attention, experts, norm)
    first, every = config.integer("first_k_dense_replace", 0), config.integer("moe_layer_freq", 1, least=1)
    layers = range(config.num_layers)
    return base.assemble(
        config, [sparse if layer >= first and layer % every == 0 else dense for layer in layers]
    )


def _attention(config: ConfigValues) -> LatentAttentionShape:
    rotated = config.integer("qk_rope_head_dim", least=2)
    return LatentAttentionShape(
        config.integer("num_attention_heads", least=1),
        config.integer("kv_lora_rank", least=1),
        rope_head_dim=rotated,
        nope_head_dim=config.integer("qk_nope_head_dim", least=1),
        value_head_dim=config.integer("v_head_dim", least=1),
        q_rank=config.integer("q_lora_rank", 0) or None,
        rope=base.read_plan_only_rope(config, rotated, interleaved=True),
    )


_GGUF = {
    "expert_count": "n_routed_experts",
    "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "rope.dimension_count": "qk_rope_head_dim",
}
_DEFAULTS: dict[str, Any] = {
    "max_position_embeddings": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
V2 = base.PlanOnlyFamily(
    "deepseek_v2",
    partial(_describe, score="softmax"),
    gguf_architecture="deepseek2",
    gguf_keys=_GGUF,
    defaults={**_DEFAULTS, "n_shared_experts": 2, "n_routed_experts": 64},
)
V3 = base.PlanOnlyFamily(
    "deepseek_v3",
    partial(_describe, score="sigmoid"),
    gguf_architecture="deepseek2",
    gguf_keys=_GGUF,
    defaults={
        **_DEFAULTS,
        "max_position_embeddings": 4096,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
    },
)
