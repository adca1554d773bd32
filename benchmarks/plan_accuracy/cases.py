"""The cases: a development list, to which the planner's model may be fitted, and a held-out list. No torch.

A case is one line:

    MODEL METHOD ROWSxTOKENS [packed] [KEY=VALUE …]

with the keys of `Case.options`. The held-out list has every kind of case and four models that are not in the other
list; it is measured once, at the end. A later change of the planner's model needs new cases.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from benchmarks.models import MODELS

METHODS = ("full", "lora", "qlora", "int8")
KEYS = {
    "recompute": "recompute",
    "limit": "memory_limit",
    "optim": "optim",
    "graphs": "cuda_graphs",
    "compile": "torch_compile",
    "accumulation": "gradient_accumulation_steps",
    "tiles": "mlp_tiles",
    "gradients": "gradient_dtype",
    "in_backward": "optim_in_backward",
    "unpacked": "dequantized_layers",
}
"""Keys of a case to recipe keys; in addition `r` is the adapters' rank."""


@dataclass(frozen=True)
class Case:
    """One run of `trimtab train`."""

    name: str
    model: str
    method: str
    rows: int
    tokens: int
    packed: bool = False
    options: dict[str, str] = field(default_factory=dict)

    @staticmethod
    def parse(line: str) -> Case:
        """Parse a case.

        Example:
            >>> Case.parse("qwen3-0.6b lora 2x1024 packed recompute=block r=8").options
            {'recompute': 'block', 'r': '8'}
        """
        model, method, size, *words = line.split()
        found = re.fullmatch(r"(\d+)x(\d+)", size)
        if found is None or method not in METHODS or model not in CONFIGS:
            raise ValueError(f"not a case: {line}")
        packed = "packed" in words
        options = dict(word.split("=", 1) for word in words if word != "packed")
        if unknown := set(options) - {*KEYS, "r"}:
            raise ValueError(f"unknown keys {', '.join(sorted(unknown))} in: {line}")
        return Case(line, model, method, int(found[1]), int(found[2]), packed, options)

    @property
    def step_tokens(self) -> int:
        """Tokens per optimizer step."""
        return self.rows * self.tokens * int(self.options.get("accumulation", 1))

    def recipe(self) -> dict[str, Any]:
        """The recipe keys that the case determines.

        Example:
            >>> Case.parse("qwen3-0.6b qlora 2x1024 limit=6GiB graphs=false").recipe()["memory_limit"]
            '6GiB'
        """
        found: dict[str, Any] = {
            "max_seq_length": self.tokens,
            "per_device_train_batch_size": self.rows,
            "gradient_accumulation_steps": 1,
            "packing": self.packed,
            "optim": "adamw_8bit",
        }
        if self.method != "full":
            found["lora"] = {"r": int(self.options.get("r", 16))}
        found |= {"load_in_4bit": self.method == "qlora", "load_in_8bit": self.method == "int8"}
        for key, name in KEYS.items():
            if key in self.options:
                found[name] = _value(self.options[key])
        if found.get("optim_in_backward"):
            found["max_grad_norm"] = 0.0  # all gradients never exist at the same time
        return found


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    return int(text) if text.isdigit() else text


TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}
CONFIGS = MODELS | {f"tiny-{name}": config | TINY for name, config in MODELS.items()}
"""config.json by model, including tiny ones for tests on a CPU."""

DEVELOPMENT = """
smollm2-135m full 8x512
smollm2-135m full 8x2048 packed
smollm2-135m full 16x1024 optim=adamw_torch graphs=false
smollm2-135m full 4x4096 recompute=block optim=adamw_torch_fused
smollm2-135m full 2x8192 compile=true graphs=false
smollm2-135m lora 8x1024 graphs=false
smollm2-135m qlora 4x2048 packed
qwen2.5-0.5b full 4x1024
qwen2.5-0.5b full 4x2048 packed recompute=pointwise
qwen2.5-0.5b full 2x4096 accumulation=4 optim=adamw_bf16
qwen2.5-0.5b lora 4x2048 recompute=selective
qwen2.5-0.5b qlora 1x16384 recompute=block
qwen2.5-0.5b int8 4x1024 graphs=false
qwen3-0.6b full 4x1024
qwen3-0.6b full 4x1024 packed gradients=bf16
qwen3-0.6b full 4x4096 recompute=none
qwen3-0.6b full 4x4096 packed graphs=false
qwen3-0.6b full 4x1024 in_backward=true gradients=bf16
qwen3-0.6b full 2x2048 optim=adamw_torch accumulation=2
qwen3-0.6b full 4x2048 limit=7GiB
qwen3-0.6b full 4x2048 limit=6.5GiB
qwen3-0.6b full 1x32768 recompute=offload_attention
qwen3-0.6b full 4x2048 compile=true
qwen3-0.6b lora 8x1024 packed r=64
qwen3-0.6b qlora 8x2048 graphs=false
qwen3-1.7b full 2x2048 gradients=bf16
qwen3-1.7b full 2x4096 recompute=block packed
qwen3-1.7b lora 4x2048 recompute=offload
qwen3-1.7b int8 2x4096
llama-3.2-1b full 2x2048 optim=adamw_torch_fused
llama-3.2-1b full 4x4096 recompute=selective packed
llama-3.2-1b lora 4x1024 graphs=false r=8
llama-3.2-1b qlora 1x8192 limit=4GiB
llama-3.2-1b qlora 1x65536 recompute=offload
llama-3.2-1b int8 8x512 packed
llama-8b lora 1x4096 recompute=block
llama-8b lora 2x2048 packed
llama-8b qlora 2x2048
llama-8b qlora 2x2048 limit=7.5GiB graphs=false
llama-8b qlora 1x8192 limit=8.5GiB
llama-8b qlora 1x8192 recompute=offload tiles=4
llama-8b qlora 4x4096 packed recompute=selective
llama-8b qlora 1x32768 limit=16GiB
llama-8b int8 2x2048 recompute=block
"""

HELD_OUT = """
smollm2-135m full 16x512 optim=adamw_bf16
smollm2-135m full 4x2048 graphs=false gradients=bf16
smollm2-135m int8 8x1024 packed
smollm2-135m full 1x8192 recompute=selective
smollm2-360m full 8x1024
smollm2-360m full 4x2048 packed recompute=block
smollm2-360m full 8x512 graphs=false optim=adamw_torch_fused
smollm2-360m lora 8x2048 recompute=pointwise r=32
smollm2-360m qlora 2x8192 packed
smollm2-360m full 4x4096 limit=6GiB
qwen2.5-0.5b full 8x512 packed
qwen2.5-0.5b full 1x16384 recompute=offload
qwen2.5-0.5b qlora 4x4096 graphs=false
qwen2.5-1.5b full 2x2048 gradients=bf16
qwen2.5-1.5b full 2x2048 in_backward=true gradients=bf16
qwen2.5-1.5b full 1x4096 recompute=block optim=adamw_torch accumulation=2
qwen2.5-1.5b lora 4x1024 packed
qwen2.5-1.5b lora 2x4096 compile=true graphs=false
qwen2.5-1.5b qlora 2x4096 limit=5GiB
qwen2.5-1.5b int8 4x2048 recompute=selective
qwen3-0.6b full 2x1024 graphs=false
qwen3-0.6b full 8x1024 packed recompute=selective
qwen3-0.6b full 2x8192 limit=8GiB
qwen3-0.6b full 4x512 optim=adamw_torch_fused accumulation=4
qwen3-0.6b lora 4x4096 recompute=none
qwen3-0.6b int8 4x2048 packed
qwen3-1.7b full 1x8192 recompute=selective gradients=bf16
qwen3-1.7b qlora 4x2048
qwen3-1.7b qlora 1x32768 recompute=offload_half
llama-3.2-1b full 4x1024 packed
llama-3.2-1b full 2x8192 limit=14GiB
llama-3.2-1b lora 2x4096 compile=true
llama-3.2-1b int8 4x2048 graphs=false
llama-3.2-3b lora 2x2048 packed
llama-3.2-3b lora 1x8192 recompute=block
llama-3.2-3b qlora 4x1024 graphs=false
llama-3.2-3b qlora 2x4096 limit=6GiB
llama-3.2-3b int8 1x4096 recompute=pointwise
mistral-7b lora 1x2048
mistral-7b qlora 2x4096 packed
mistral-7b qlora 1x8192 limit=8GiB
mistral-7b int8 1x4096 recompute=block r=64
llama-8b qlora 1x4096 graphs=false
llama-8b qlora 1x16384 recompute=offload_attention
llama-8b qlora 1x65536 limit=24GiB
llama-8b lora 4x1024 recompute=selective
"""

CPU = """
tiny-qwen3-0.6b full 2x64
tiny-llama-8b qlora 2x64 packed recompute=block
tiny-llama-8b lora 1x128 optim=adamw_torch accumulation=2
"""
"""Cases for tests, which take seconds on a CPU."""

LISTS = {
    name: tuple(Case.parse(line) for line in text.strip().splitlines())
    for name, text in (("development", DEVELOPMENT), ("held-out", HELD_OUT), ("cpu", CPU))
}
