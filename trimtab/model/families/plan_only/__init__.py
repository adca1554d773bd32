"""Families that can be planned but not trained yet, one file each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimtab.facts.shapes import ModelShape, check_shape
from trimtab.model.families.config_json import ConfigValues
from trimtab.model.families.plan_only import (
    deepseek,
    gemma,
    gemma2,
    gemma3,
    glm4,
    gpt_oss,
    granite,
    mixtral,
    olmo2,
    phi3,
    qwen_moe,
    smollm3,
)
from trimtab.model.families.plan_only.base import PlanOnlyFamily

PLAN_ONLY: dict[str, PlanOnlyFamily] = {
    family.name: family
    for family in (
        gemma.FAMILY,
        gemma2.FAMILY,
        gemma3.FAMILY,
        gemma3.WITH_VISION,
        phi3.FAMILY,
        olmo2.FAMILY,
        olmo2.OLMO3,
        granite.FAMILY,
        glm4.FAMILY,
        smollm3.FAMILY,
        mixtral.FAMILY,
        qwen_moe.QWEN2,
        qwen_moe.QWEN3,
        deepseek.V2,
        deepseek.V3,
        gpt_oss.FAMILY,
    )
}
"""Families by transformers' `model_type`."""


def plan_only_shape(config: Mapping[str, Any], where: str = "config.json") -> ModelShape:
    """Returns the shape that a `config.json` of one of these families describes.

    Quantized weights (`quantization_config`) are described as unquantized: fine-tuning dequantizes them.

    Example:
        >>> plan_only_shape({"model_type": "mixtral", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
        ...     "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}).num_active_parameters
        6064
    """
    family = PLAN_ONLY[str(config.get("model_type"))]
    return check_shape(family.describe(ConfigValues({**family.defaults, **config}, where)))


__all__ = ["PLAN_ONLY", "PlanOnlyFamily", "plan_only_shape"]
