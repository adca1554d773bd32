"""Gemma 3's language model: Gemma 2's norms, QK-norm, five sliding-window layers per full one, RoPE settings per kind.

Of a multimodal config, only `text_config` is read; the vision tower is not counted.
"""

from __future__ import annotations

from typing import Any

from trimtab.facts.blocks import AttentionShape, BlockShape, Rope
from trimtab.facts.errors import ModelError
from trimtab.facts.shapes import ModelShape
from trimtab.model.families.config_json import ConfigValues, read_rope
from trimtab.model.families.plan_only import base

DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
}
"""transformers' Gemma3TextConfig; published configs of the larger models omit most of these."""


def _describe(config: ConfigValues) -> ModelShape:
    pattern = config.integer("sliding_window_pattern", 6, least=1)
    default = [
        base.FULL if (layer + 1) % pattern == 0 else base.SLIDING for layer in range(config.num_layers)
    ]
    windows = {base.FULL: None, base.SLIDING: base.read_window(config)}
    feed_forward, norm = base.read_feed_forward(config), base.read_norm(config, unit_offset=True)
    blocks = {
        kind: BlockShape(_attention(config, kind, window), feed_forward, norm, "both")
        for kind, window in windows.items()
    }
    return base.assemble(config, [blocks[kind] for kind in base.read_layer_kinds(config, default)])


def _attention(config: ConfigValues, kind: str, window: int | None) -> AttentionShape:
    bias = config.flag("attention_bias")
    return base.read_attention(
        config,
        _rope(config, kind),
        qk_norm="head",
        scale=config.number("query_pre_attn_scalar", 256.0, positive=True) ** -0.5,
        softcap=config.number("attn_logit_softcapping", 0.0) or None,
        window=window,
        qkv_bias=bias,
        o_bias=bias,
    )


def _rope(config: ConfigValues, kind: str) -> Rope:
    """Reads a kind's RoPE: from `rope_parameters` (transformers 5), or `rope_local_base_freq` for sliding windows."""
    mine = base.values_of_kind(config, kind)
    if mine is not config:
        return read_rope(mine, config.integer("max_position_embeddings"))
    if kind == base.SLIDING:
        return Rope(config.number("rope_local_base_freq", 10_000.0))
    values = {**config.data, "rope_theta": config.number("rope_theta", 1_000_000.0)}
    return read_rope(ConfigValues(values, config.where), config.integer("max_position_embeddings"))


def _describe_text(config: ConfigValues) -> ModelShape:
    text = config.get("text_config")
    if not isinstance(text, dict):
        raise ModelError(f"{config.where} has no text_config", base.DOWNLOAD_AGAIN)
    whole = {**DEFAULTS, **text, "model_type": "gemma3_text"}
    return _describe(ConfigValues(whole, f"{config.where} (text_config)"))


FAMILY = base.PlanOnlyFamily("gemma3_text", _describe, gguf_architecture="gemma3", defaults=DEFAULTS)
WITH_VISION = base.PlanOnlyFamily("gemma3", _describe_text)
