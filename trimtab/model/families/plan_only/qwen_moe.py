"""Qwen2-MoE (with Qwen1.5-MoE) and Qwen3-MoE: experts in most layers, with gated shared experts in the former."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.facts.blocks import AttentionShape, BlockShape, ExpertsShape
from trimtab.facts.errors import ModelError
from trimtab.facts.shapes import ModelShape
from trimtab.model.families.config_json import ConfigValues
from trimtab.model.families.plan_only import base


def _describe_qwen2(config: ConfigValues) -> ModelShape:
    count, active = base.read_experts(config, "num_experts")
    experts = ExpertsShape(
        count,
        active,
        config.integer("moe_intermediate_size", least=1),
        shared=1,
        shared_width=config.integer("shared_expert_intermediate_size", least=1),
        shared_gate=True,
    )
    attention = base.read_attention(config, qkv_bias=config.flag("qkv_bias", True))
    _check_no_windows(config)
    return base.assemble(config, _blocks(config, attention, experts))


def _describe_qwen3(config: ConfigValues) -> ModelShape:
    count, active = base.read_experts(config, "num_experts")
    experts = ExpertsShape(count, active, config.integer("moe_intermediate_size", least=1))
    bias = config.flag("attention_bias")
    attention = base.read_attention(config, qk_norm="head", qkv_bias=bias, o_bias=bias)
    _check_no_windows(config)
    return base.assemble(config, _blocks(config, attention, experts))


def _check_no_windows(config: ConfigValues) -> None:
    if config.flag("use_sliding_window"):
        raise ModelError(
            f"{config.where}: use_sliding_window is true",
            "plan a model of this family without a sliding window",
        )


def _blocks(config: ConfigValues, attention: AttentionShape, experts: ExpertsShape) -> Sequence[BlockShape]:
    """Experts in every `decoder_sparse_step`-th layer that is not in `mlp_only_layers`."""
    step, dense_layers = (
        config.integer("decoder_sparse_step", 1, least=1),
        config.get("mlp_only_layers") or [],
    )
    if not isinstance(dense_layers, list):
        raise ModelError(f"{config.where}: mlp_only_layers is {dense_layers!r}", base.DOWNLOAD_AGAIN)
    norm = base.read_norm(config)
    sparse = BlockShape(attention, experts, norm)
    layers = range(config.num_layers)
    with_experts = [layer not in dense_layers and (layer + 1) % step == 0 for layer in layers]
    if all(with_experts):
        return [sparse] * len(with_experts)
    dense = BlockShape(attention, base.read_feed_forward(config), norm)
    return [sparse if has else dense for has in with_experts]


QWEN2 = base.PlanOnlyFamily(
    "qwen2_moe",
    _describe_qwen2,
    gguf_architecture="qwen2moe",
    gguf_keys={"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
    defaults={
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
)
QWEN3 = base.PlanOnlyFamily(
    "qwen3_moe",
    _describe_qwen3,
    gguf_architecture="qwen3moe",
    defaults={
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
)
