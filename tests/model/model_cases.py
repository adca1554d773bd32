"""Tiny models of every family: transformers' config classes and the keys specific to each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

TINY: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # large, so that attention is far from uniform and mistakes show
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("LlamaConfig", {"num_key_value_heads": 4, "rms_norm_eps": 1e-5}),
    "llama3": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "yarn": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "linear": ("LlamaConfig", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
    "dynamic": (
        "LlamaConfig",
        {
            "max_position_embeddings": 16,  # shorter than the sequence: the base grows
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        },
    ),
    "llama-biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "mistral": ("MistralConfig", {"sliding_window": 7}),
    "mistral-full": ("MistralConfig", {"sliding_window": None}),
    "smollm2": (
        "LlamaConfig",
        {"tie_word_embeddings": True, "num_attention_heads": 8, "num_key_value_heads": 2},
    ),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2Config",
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-bias": ("Qwen3Config", {"head_dim": 16, "attention_bias": True}),
}


def oracle_model(name: str, seed: int = 0) -> Any:
    """transformers' tiny random model of a case, in fp32, norms and biases random too."""
    import transformers

    config_class, special = CASES[name]
    torch.manual_seed(seed)
    config = getattr(transformers, config_class)(**{**TINY, **special})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif parameter_name.endswith("bias"):
                parameter.uniform_(-0.3, 0.3)
    return model.eval()


def oracle_folder(name: str, folder: Path, **save: Any) -> Any:
    """The model, saved to a folder by transformers."""
    model = oracle_model(name)
    model.save_pretrained(folder, **save)
    return model


def token_ids(vocab: int = 96, batch: int = 2, tokens: int = 24, seed: int = 1) -> torch.Tensor:
    """input_ids_BT, the same every time."""
    return torch.randint(0, vocab, (batch, tokens), generator=torch.Generator().manual_seed(seed))
