"""config.json of the benchmarked models; the benchmarks use random weights. No torch."""

from __future__ import annotations

from typing import Any

_COMMON = {
    "hidden_act": "silu",
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "initializer_range": 0.02,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def _config(
    family: str,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    heads: tuple[int, int, int],
    vocab_size: int,
    positions: int,
    *,
    tied: bool = True,
    **more: Any,
) -> dict[str, Any]:
    """A config.json; `heads` are query heads, key/value heads and the head size."""
    return {
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "model_type": family,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "vocab_size": vocab_size,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000,
        "tie_word_embeddings": tied,
        **_COMMON,
        **more,
    }


MODELS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151_936,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "tie_word_embeddings": True,
        **_COMMON,
    },
    "llama-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128_256,
        "max_position_embeddings": 1_048_576,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000,
        "tie_word_embeddings": False,
        "mlp_bias": False,
        **_COMMON,
    },
    # The shapes of the published models (all are in litgpt/config.py of Lightning-AI/litgpt).
    "qwen3-1.7b": _config("qwen3", 2048, 6144, 28, (16, 8, 128), 151_936, 40_960),
    "llama-3.2-1b": _config("llama", 2048, 8192, 16, (32, 8, 64), 128_256, 131_072),
    "llama-3.2-3b": _config("llama", 3072, 8192, 28, (24, 8, 128), 128_256, 131_072),
    "smollm2-135m": _config("llama", 576, 1536, 30, (9, 3, 64), 49_152, 8192),
    "smollm2-360m": _config("llama", 960, 2560, 32, (15, 5, 64), 49_152, 8192),
    "qwen2.5-0.5b": _config("qwen2", 896, 4864, 24, (14, 2, 64), 151_936, 32_768),
    "qwen2.5-1.5b": _config("qwen2", 1536, 8960, 28, (12, 2, 128), 151_936, 131_072),
    "mistral-7b": _config("mistral", 4096, 14_336, 32, (32, 8, 128), 32_768, 32_768, tied=False),
}
