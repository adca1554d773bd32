"""Gemma 2: norms before and after each sublayer, soft-capped attention, every other layer with a sliding window."""

from __future__ import annotations

import dataclasses

from trimtab.facts.blocks import BlockShape
from trimtab.facts.shapes import ModelShape
from trimtab.model.families.config_json import ConfigValues
from trimtab.model.families.plan_only import base


def _describe(config: ConfigValues) -> ModelShape:
    cap = config.number("attn_logit_softcapping", 0.0) or None
    scalar = config.number("query_pre_attn_scalar", 256.0, positive=True)
    attention = base.read_attention(
        config, scale=scalar**-0.5, softcap=cap, qkv_bias=config.flag("attention_bias"),
        o_bias=config.flag("attention_bias"),
    )  # fmt: skip
    window, feed_forward = base.read_window(config), base.read_feed_forward(config)
    default = [base.FULL if layer % 2 else base.SLIDING for layer in range(config.num_layers)]
    norm = base.read_norm(config, unit_offset=True)
    windows = {base.FULL: None, base.SLIDING: window}
    blocks = {
        kind: BlockShape(dataclasses.replace(attention, window=window), feed_forward, norm, "both")
        for kind, window in windows.items()
    }
    return base.assemble(config, [blocks[kind] for kind in base.read_layer_kinds(config, default)])


FAMILY = base.PlanOnlyFamily(
    "gemma2",
    _describe,
    gguf_architecture="gemma2",
    gguf_keys={"attn_logit_softcapping": "attn_logit_softcapping"},
    defaults={
        "max_position_embeddings": 8192,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "attn_logit_softcapping": 50.0,
    },
)
