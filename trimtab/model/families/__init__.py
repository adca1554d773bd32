"""One file per model family: config.json ↔ shape, tensor names in files, and family-specific settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimtab.facts.errors import ModelError
from trimtab.facts.shapes import ModelShape, check_shape
from trimtab.model.families import llama, mistral, qwen2, qwen3
from trimtab.model.families.base import Family
from trimtab.model.families.config_json import HARMLESS, ConfigValues, check_supported, common_keys
from trimtab.model.families.plan_only import PLAN_ONLY, plan_only_shape

FAMILIES: dict[str, Family] = {module.FAMILY.name: module.FAMILY for module in (llama, mistral, qwen2, qwen3)}
"""Families by transformers' `model_type`."""


def family(name: str) -> Family:
    """Returns a family by its name."""
    if name not in FAMILIES:
        raise ModelError(f"unknown model family {name!r}", f"supported are {', '.join(FAMILIES)}")
    return FAMILIES[name]


def shape_from_config(config: Mapping[str, Any], where: str = "config.json") -> ModelShape:
    """Returns the shape that a `config.json` describes.

    Args:
        config: the parsed file.
        where: the file's name in errors.

    Example:
        >>> shape_from_config({"model_type": "llama", "vocab_size": 64, "hidden_size": 16,
        ...     "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}).attention.head_dim
        4
    """
    return _described(config, where)[0]


def shape_for_planning(config: Mapping[str, Any], where: str = "config.json") -> ModelShape:
    """Returns the shape that a `config.json` describes, for planning: of trainable families and of plan-only ones.

    Args:
        config: the parsed file.
        where: the file's name in errors.

    Raises:
        ModelError: an unknown family, or invalid values.

    Example:
        >>> tiny = shape_for_planning({"model_type": "mixtral", "vocab_size": 64, "hidden_size": 16,
        ...     "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2})
        >>> tiny.blocks[0].feed_forward.count
        8
    """
    name = config.get("model_type")
    if isinstance(name, str) and name in PLAN_ONLY:
        return plan_only_shape(config, where)
    if not isinstance(name, str) or name not in FAMILIES:
        raise ModelError(
            f"{where} describes a model of type {name!r}, which trimtab does not support",
            f"use one of {', '.join([*FAMILIES, *PLAN_ONLY])}",
        )
    return shape_from_config(config, where)


def unknown_keys(config: Mapping[str, Any], where: str = "config.json") -> list[str]:
    """Returns the keys of a `config.json` that its family neither reads nor lists as harmless.

    Example:
        >>> unknown_keys({"model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
        ...     "num_hidden_layers": 1, "num_attention_heads": 4, "use_cache": True, "logit_scale": 0.5})
        ['logit_scale']
    """
    _, values, found = _described(config, where)
    known = HARMLESS | found.harmless
    present = [key for key in values.unread() if key in config or key.partition(".")[0] in config]
    return [key for key in present if key not in known]


def _described(config: Mapping[str, Any], where: str) -> tuple[ModelShape, ConfigValues, Family]:
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        known = ", which trimtab does not support"
        if isinstance(name, str) and name in PLAN_ONLY:
            known = f": trimtab can plan {name} models but not train them yet"
        raise ModelError(
            f"{where} describes a model of type {name!r}{known}",
            f"supported are {', '.join(FAMILIES)} (SmolLM2 models have type llama)",
        )
    found = FAMILIES[name]
    values = ConfigValues({**found.defaults, **config}, where)
    check_supported(values)
    return check_shape(found.describe(values)), values, found


def config_from_shape(
    shape: ModelShape, *, dtype: str, extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Creates a `config.json` that transformers 4 and 5 load.

    Args:
        shape: the model.
        dtype: torch's name of the stored weights' dtype ("bfloat16").
        extra: further keys, such as `bos_token_id` and `eos_token_id`, which are null otherwise.
    """
    found = family(shape.family)
    config = {
        "architectures": [found.architecture],
        **common_keys(shape),
        **found.own_keys(shape),
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    if shape_from_config(config) != shape:
        raise ModelError(
            f"transformers' {found.architecture} cannot describe this model",
            "build it with the biases, norms and sliding windows of its family",
        )
    return {**config, **(extra or {})}


__all__ = [
    "FAMILIES",
    "PLAN_ONLY",
    "Family",
    "config_from_shape",
    "family",
    "shape_for_planning",
    "shape_from_config",
    "unknown_keys",
]
