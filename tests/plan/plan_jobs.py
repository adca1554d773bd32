"""Jobs on an H200 that several tests plan: what this library's own kernels run there."""

from __future__ import annotations

import dataclasses
from typing import Any

from trimtab.adapt.spec import LoraSettings
from trimtab.facts.devices import DeviceFacts
from trimtab.facts.shapes import ModelShape
from trimtab.plan.job import Job

QWEN = ModelShape("qwen3", 151_936, 1024, 3072, 28, num_heads=16, num_kv_heads=8, head_dim=128,
                  tie_embeddings=True, qk_norm=True, max_positions=32_768)  # fmt: skip
LLAMA_8B = ModelShape("llama", 128_256, 4096, 14_336, 32, num_heads=32, num_kv_heads=8, head_dim=128)
H200 = DeviceFacts(
    "NVIDIA H200", "cuda", 150 * 10**9, capability=(9, 0), bf16=True, host_free_bytes=120 * 2**30
)
NF4 = {"kind": "nf4", "block": 64, "double": True, "impl": "triton"}
FULL = Job(
    QWEN,
    batch=4,
    tokens=1024,
    accumulation=1,
    dtype="bf16",
    weights_dtype="bf16",
    gradient_dtype="bf16",
    optimizer="adamw_8bit",
    attention="triton",
    device="cuda",
    bf16=True,
    pointwise="triton",
    optimizer_impl="triton",
    loss_impl="triton",
    loss_memory=2 * 10**9,
)
QLORA = dataclasses.replace(FULL, shape=LLAMA_8B, batch=1, lora=LoraSettings(r=16), quantization=NF4)
CHOICES: dict[str, Any] = {
    "dtype": "bf16",
    "weights_dtype": "bf16",
    "gradient_dtype": "bf16",
    "attention": {"impl": "triton", "reason": "for this test", "rejected": []},
    "pointwise": {"impl": "triton", "reason": "for this test"},
    "optimizer": {"name": "adamw_8bit", "impl": "triton", "reason": "for this test"},
}
"""What a recipe's `auto` keys came to."""
