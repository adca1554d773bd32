"""config.json of the models whose shapes are measured; their weights are random. No torch."""

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
}
