"""Models that can be planned but not trained: configs and GGUF headers that are damaged or of another kind."""

from __future__ import annotations

from typing import Any

from cases import case, in_turn, listed

from trimtab.model.catalogue import catalogue_entries, parse_catalogue
from trimtab.model.families import shape_for_planning
from trimtab.model.families.plan_only.gguf import gguf_shape_for_planning

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "moe_intermediate_size": 16,
}
AGAIN = "download the model's config.json again"
PLAN_ONLY = "model/families/plan_only"


def described(model_type: str, **changes: Any) -> object:
    config = {"model_type": model_type, **SIZES, **changes}
    if model_type == "gemma3" and "text_config" not in changes:
        config["text_config"] = dict(SIZES)
    return shape_for_planning(config)


def refused(key: str, model_type: str, **changes: Any) -> None:
    """A config that is damaged; without the damage it is described."""
    case(
        f"{PLAN_ONLY}/{key}",
        lambda w: described(model_type, **changes),
        lambda w, remedy: described(model_type),
    )


case(
    "model/families/__init__.py:shape_for_planning: use one of {}",
    lambda w: described("mamba9"),
    lambda w, remedy: in_turn(described, listed(remedy, "one of")),
)
refused("base.py:read_plan_only_rope: download it again: expected an object", "phi3", rope_scaling="far")
refused(f"base.py:read_plan_only_rope: {AGAIN}", "phi3", partial_rotary_factor=-1.0)
refused(f"base.py:read_layer_kinds: {AGAIN}", "gemma2", layer_types=["full_attention"])
refused(
    "deepseek.py:_describe: plan a model of this family without biases, as all published ones have none",
    "deepseek_v3",
    attention_bias=True,
)
refused("gemma3.py:_describe_text: {}", "gemma3", text_config=None)
refused(
    "qwen_moe.py:_check_no_windows: plan a model of this family without a sliding window",
    "qwen3_moe",
    use_sliding_window=True,
)
refused("qwen_moe.py:_blocks: {}", "qwen3_moe", mlp_only_layers=3)
refused("smollm3.py:_rotated_layers: {}", "smollm3", no_rope_layers=[1])

# GGUF files.


def header(arch: str, **changes: Any) -> object:
    """What such a header describes; `__` for a dot."""
    keys: dict[str, Any] = {
        "block_count": 4,
        "context_length": 64,
        "embedding_length": 32,
        "feed_forward_length": 48,
        "attention.head_count": 4,
        "attention.head_count_kv": 4,
        "attention.key_length": 8,
        "attention.value_length": 8,
        "attention.kv_lora_rank": 8,
        "expert_feed_forward_length": 16,
        "rope.dimension_count": 4 if arch == "deepseek2" else 8,
        **({"expert_count": 4, "expert_used_count": 2} if "moe" in arch or arch in EXPERTS else {}),
    }
    for name, value in changes.items():
        keys[name.replace("__", ".")] = value
    split = {"split.count": keys.pop("split.count")} if "split.count" in keys else {}
    metadata = {f"{arch}.{name}": value for name, value in keys.items()}
    return gguf_shape_for_planning({"general.architecture": arch, **metadata, **split}, [], vocab_size=64)


EXPERTS = ("deepseek2", "gpt-oss")
case(
    f"{PLAN_ONLY}/gguf.py:gguf_shape_for_planning: use one of {{}}",
    lambda w: header("mamba9"),
    lambda w, remedy: in_turn(header, listed(remedy, "one of")),
)
case(
    f"{PLAN_ONLY}/gguf.py:gguf_shape_for_planning: join them with llama-gguf-split --merge",
    lambda w: header("gemma2", split__count=2),
    lambda w, remedy: header("gemma2", split__count=1),
)
case(
    f"{PLAN_ONLY}/gguf.py:_latent: download it again: latent attention has dimensions without RoPE",
    lambda w: header("deepseek2", attention__key_length=2),
    lambda w, remedy: header("deepseek2"),
)

# The catalogue of known models.

for damaged in ("{", '{"version": 1, "models": [{"name": 3}]}'):
    case(
        "model/catalogue.py:parse_catalogue: install trimtab again",
        lambda w, text=damaged: parse_catalogue(text),  # type: ignore[misc]
        lambda w, remedy: catalogue_entries(),
    )
