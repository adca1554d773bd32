"""OLMo 2 and 3: norms after each sublayer instead of before it, and a QK-norm over all heads together.

In OLMo 3 three layers of four have a sliding window.
"""

from __future__ import annotations

from trimtab.facts.blocks import BlockShape
from trimtab.facts.shapes import ModelShape
from trimtab.model.families.config_json import ConfigValues
from trimtab.model.families.plan_only import base


def _block(config: ConfigValues, window: int | None = None) -> BlockShape:
    bias = config.flag("attention_bias")
    attention = base.read_attention(config, qk_norm="full", qkv_bias=bias, o_bias=bias, window=window)
    return BlockShape(attention, base.read_feed_forward(config), base.read_norm(config), "post")


def _describe(config: ConfigValues) -> ModelShape:
    return base.assemble(config, [_block(config)] * config.num_layers)


def _describe_olmo3(config: ConfigValues) -> ModelShape:
    full = base.values_of_kind(config, base.FULL)
    sliding = base.values_of_kind(config, base.SLIDING)
    if sliding is config:  # in older files scaling applies to full attention only
        sliding = ConfigValues({**config.data, "rope_scaling": None}, config.where)
    blocks = {base.FULL: _block(full), base.SLIDING: _block(sliding, base.read_window(config))}
    default = [base.SLIDING if (layer + 1) % 4 else base.FULL for layer in range(config.num_layers)]
    return base.assemble(config, [blocks[kind] for kind in base.read_layer_kinds(config, default)])


OLMO3 = base.PlanOnlyFamily(
    "olmo3",
    _describe_olmo3,
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "sliding_window": 4096},
)
FAMILY = base.PlanOnlyFamily(
    "olmo2",
    _describe,
    gguf_architecture="olmo2",
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
)
