"""Jobs on an H200 with trimtab's own kernels, shared by several tests."""

from __future__ import annotations

import dataclasses

from trimtab.adapt.spec import LoraSettings
from trimtab.adapt.spec_quantized import Quantization
from trimtab.facts.devices import DeviceFacts
from trimtab.facts.shapes import ModelShape, uniform_shape
from trimtab.plan import DataFacts, Plan, make_plan
from trimtab.plan.job import Job
from trimtab.plan.resolved import (
    AttentionConfig,
    OptimizerConfig,
    PointwiseConfig,
    PrecisionConfig,
    Resolved,
)
from trimtab.recipe import Recipe
from trimtab.run.resolve import resolve_memory

QWEN = uniform_shape("qwen3", 151_936, 1024, 3072, 28, num_heads=16, num_kv_heads=8, head_dim=128,
                  tie_embeddings=True, qk_norm=True, max_positions=32_768)  # fmt: skip
LLAMA_8B = uniform_shape("llama", 128_256, 4096, 14_336, 32, num_heads=32, num_kv_heads=8, head_dim=128)
H200 = DeviceFacts(
    "NVIDIA H200", "cuda", 150 * 10**9, capability=(9, 0), bf16=True, host_free_bytes=120 * 2**30
)
NF4 = Quantization("nf4", double=True, impl="triton")
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


def resolved_for(shape: ModelShape) -> Resolved:
    """A resolved configuration without a memory plan."""
    attention = AttentionConfig.uniform(shape.num_layers, "triton", reason="for this test")
    return Resolved(
        device="cuda",
        threads=4,
        deterministic=False,
        precision=PrecisionConfig("bf16", "bf16", "bf16"),
        attention=attention,
        pointwise=PointwiseConfig("triton", "for this test"),
        optimizer=OptimizerConfig("adamw_8bit", "triton", "for this test"),
    )


def planned(
    recipe: Recipe, shape: ModelShape, device: DeviceFacts, resolved: Resolved, data: DataFacts | None = None
) -> Plan:
    """A plan without CUDA graphs, with the given memory plan or the planner's choice."""
    recipe = recipe.model_copy(update={"cuda_graphs": False})
    if resolved.memory is None:
        resolved = resolve_memory(recipe, shape, device, resolved)
    return make_plan(recipe, shape, resolved, device=device, data=data)
