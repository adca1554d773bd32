"""Shared functions of families that can be planned but not trained: convert a config.json to blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trimtab.facts.blocks import AttentionShape, BlockShape, FeedForwardShape, Norm, Rope, RopeScaling
from trimtab.facts.errors import ModelError
from trimtab.facts.shapes import ModelShape
from trimtab.model.families.config_json import ConfigValues, read_rope

FULL, SLIDING = "full_attention", "sliding_attention"
DOWNLOAD_AGAIN = "download the model's config.json again"


@dataclass(frozen=True)
class PlanOnlyFamily:
    """A family whose models can be planned but not trained yet."""

    name: str
    """transformers' `model_type`."""
    describe: Callable[[ConfigValues], ModelShape]
    """Converts a config.json to a shape."""
    gguf_architecture: str = ""
    """`general.architecture` of its GGUF files."""
    gguf_keys: Mapping[str, str] = field(default_factory=dict)
    """GGUF header keys, without the architecture, to those of a config.json, in addition to those of all families."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """transformers' defaults for keys that a config omits (its configuration_<family>.py)."""


def read_attention(config: ConfigValues, rope: Rope | None = None, **options: Any) -> AttentionShape:
    """Reads softmax attention from the keys that all families share; `options` are fields of `AttentionShape`."""
    hidden, heads = config.integer("hidden_size", least=1), config.integer("num_attention_heads", least=1)
    head_dim = config.integer("head_dim", hidden // heads, least=1)
    return AttentionShape(
        heads,
        config.integer("num_key_value_heads", heads, least=1),
        head_dim,
        rope=rope or read_plan_only_rope(config, head_dim),
        **options,
    )


def read_plan_only_rope(config: ConfigValues, head_dim: int, *, interleaved: bool = False) -> Rope:
    """Like `read_rope`, plus features that no trainable family has: LongRoPE and partial RoPE."""
    positions = config.integer("max_position_embeddings", least=1)
    stated = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(stated, dict):
        raise ModelError(
            f"{config.where}: the RoPE settings are {stated!r}", "download it again: expected an object"
        )
    kind = stated.get("rope_type") or stated.get("type")
    if kind in ("longrope", "su"):
        theta = ConfigValues(stated, config.where).number("rope_theta", config.number("rope_theta", 10_000.0))
        original = config.get("original_max_position_embeddings")
        rope = Rope(theta, RopeScaling("longrope", original_max_positions=original or positions))
    else:
        rope = read_rope(config, positions)
    share = config.number(
        "partial_rotary_factor", ConfigValues(stated, config.where).number("partial_rotary_factor", 1.0)
    )
    if not 0 < share <= 1:
        raise ModelError(f"{config.where}: partial_rotary_factor is {share}", DOWNLOAD_AGAIN)
    rotated = None if share == 1 else int(head_dim * share)
    return dataclasses.replace(rope, rotary_dim=rotated, interleaved=interleaved)


def values_of_kind(config: ConfigValues, kind: str) -> ConfigValues:
    """The config with the RoPE settings of one kind of layers, if `rope_parameters` has settings per kind."""
    stated = config.get("rope_parameters")
    if not isinstance(stated, dict) or kind not in stated:
        return config
    return ConfigValues({**config.data, "rope_scaling": None, "rope_parameters": stated[kind]}, config.where)


def read_layer_kinds(config: ConfigValues, default: Sequence[str]) -> list[str]:
    """The kind of attention of each layer: `layer_types`, or the family's default."""
    kinds = config.get("layer_types") or list(default)
    if not isinstance(kinds, list) or len(kinds) != config.num_layers or not set(kinds) <= {FULL, SLIDING}:
        raise ModelError(
            f"{config.where}: layer_types must have {FULL} or {SLIDING} for each of {config.num_layers} layers",
            DOWNLOAD_AGAIN,
        )
    return kinds


def read_window(config: ConfigValues) -> int | None:
    """Reads `sliding_window`; None if it is null or 0."""
    return config.integer("sliding_window", 0) or None


def read_experts(config: ConfigValues, key: str) -> tuple[int, int]:
    """Returns (number of experts, active experts per token); the second cannot exceed the first."""
    count = config.integer(key, least=1)
    return count, config.integer("num_experts_per_tok", least=1, most=count)


def read_feed_forward(config: ConfigValues, **options: Any) -> FeedForwardShape:
    """Reads a dense feed-forward layer; `options` are fields of `FeedForwardShape`."""
    activation = config.get("hidden_activation") or config.get("hidden_act") or "silu"
    return FeedForwardShape(config.integer("intermediate_size", least=1), str(activation), **options)


def assemble(config: ConfigValues, blocks: Sequence[BlockShape]) -> ModelShape:
    """Returns the model of these blocks, with embedding, final norm and head from the config."""
    return ModelShape(
        family=str(config.get("model_type")),
        vocab_size=config.integer("vocab_size", least=1),
        hidden_size=config.integer("hidden_size", least=1),
        blocks=tuple(blocks),
        max_positions=config.integer("max_position_embeddings", least=1),
        final_norm=read_norm(config, unit_offset=bool(blocks) and blocks[0].norm.unit_offset),
        tie_embeddings=config.flag("tie_word_embeddings"),
        initializer_range=config.number("initializer_range", 0.02),
    )


def read_norm(config: ConfigValues, *, unit_offset: bool = False) -> Norm:
    """Reads the RMSNorm of all blocks."""
    return Norm(config.number("rms_norm_eps", 1e-6), unit_offset)
