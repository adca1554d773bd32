"""Converts a GGUF file's metadata to a shape for planning, also of models that cannot be trained."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from trimtab.facts.errors import ModelError
from trimtab.facts.shapes import ModelShape
from trimtab.model.families import FAMILIES
from trimtab.model.families.gguf_metadata import GGUFKeys, shape_from_gguf
from trimtab.model.families.plan_only import PLAN_ONLY, plan_only_shape
from trimtab.model.families.plan_only.base import PlanOnlyFamily

_WHOLE = {
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "context_length": "max_position_embeddings",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
"""Keys of a GGUF header, without the architecture, to those of a config.json."""
_NUMBERS = {"rope.freq_base": "rope_theta", "attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_FRACTIONS = ("attn_logit_softcapping", "attention.scale")
_SIGMOID = 2
"""llama.cpp's `expert_gating_func` of DeepSeek-V3."""


def gguf_shape_for_planning(
    metadata: Mapping[str, Any],
    tensor_names: Collection[str],
    *,
    vocab_size: int,
    rope_divisors: Sequence[float] | None = None,
    where: str = "the GGUF file",
) -> ModelShape:
    """Returns the shape that a GGUF file describes, for planning; arguments as in `shape_from_gguf`.

    Raises:
        ModelError: an unknown architecture, or a header without required keys.
    """
    arch = metadata.get("general.architecture")
    family = _plan_only_family(arch, metadata)
    if family is None:
        trained = {found.gguf_architecture for found in FAMILIES.values()}
        if arch not in trained:
            known = dict.fromkeys([*trained, *(other.gguf_architecture for other in PLAN_ONLY.values())])
            raise ModelError(
                f"{where} has a model of architecture {arch!r}, which trimtab does not support",
                f"use one of {', '.join(sorted(name for name in known if name))}",
            )
        return shape_from_gguf(
            metadata, tensor_names, vocab_size=vocab_size, rope_divisors=rope_divisors, where=where
        )
    if metadata.get("split.count", 0) not in (0, 1):
        raise ModelError(
            f"{where} is one of {metadata['split.count']} parts", "join them with llama-gguf-split --merge"
        )
    config = _config(family, GGUFKeys(metadata, str(arch), where), tensor_names)
    return plan_only_shape({**config, "vocab_size": vocab_size}, where)


def _plan_only_family(arch: Any, metadata: Mapping[str, Any]) -> PlanOnlyFamily | None:
    """Returns the plan-only family of a GGUF architecture; Mixtral's files have architecture "llama" and experts."""
    found = [family for family in PLAN_ONLY.values() if arch and family.gguf_architecture == arch]
    if arch == "llama" and not metadata.get("llama.expert_count"):
        return None
    if arch == "deepseek2":
        sigmoid = metadata.get("deepseek2.expert_gating_func") == _SIGMOID
        return PLAN_ONLY["deepseek_v3" if sigmoid else "deepseek_v2"]
    return found[0] if found else None


def _config(family: PlanOnlyFamily, keys: GGUFKeys, tensor_names: Collection[str]) -> dict[str, Any]:
    """The config.json keys equivalent to the header."""
    names = set(tensor_names)
    config: dict[str, Any] = {
        "model_type": family.name,
        "tie_word_embeddings": "output.weight" not in names,
    }
    for theirs, ours in {**_WHOLE, **family.gguf_keys}.items():
        if keys.get(theirs) is not None:
            config[ours] = keys.number(theirs, 0.0) if theirs in _FRACTIONS else keys.integer(theirs)
    for theirs, ours in _NUMBERS.items():
        if keys.get(theirs) is not None:
            config[ours] = keys.number(theirs, 0.0)
    if family.gguf_architecture == "deepseek2":
        config.update(_latent(keys))
    else:
        bias = "blk.0.attn_q.bias" in names
        config.update(attention_bias=bias, qkv_bias=bias)
        rotated, head_dim = keys.get("rope.dimension_count"), config.get("head_dim")
        if rotated is not None and head_dim:
            config["partial_rotary_factor"] = keys.integer("rope.dimension_count") / head_dim
    return config


def _latent(keys: GGUFKeys) -> dict[str, int]:
    """Head sizes of latent attention; newer files store them under `…_mla` and the latent's under the old keys."""
    mla = "_mla" if keys.get("attention.key_length_mla") is not None else ""
    head_dim, rotated = keys.integer(f"attention.key_length{mla}"), keys.integer("rope.dimension_count")
    if head_dim <= rotated:
        raise ModelError(
            f"{keys.where}: head size {head_dim}, of which {rotated} are rotated",
            "download it again: latent attention has dimensions without RoPE",
        )
    return {
        "qk_nope_head_dim": head_dim - rotated,
        "v_head_dim": keys.integer(f"attention.value_length{mla}"),
    }
