"""Plans of adapter training against real steps: weights by kind, trainable parameters, activations."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from plan_step import Step  # noqa: E402

from trimtab.adapt import (  # noqa: E402
    LoraSettings,
)
from trimtab.adapt.spec_quantized import Quantization  # noqa: E402
from trimtab.facts.shapes import uniform_shape  # noqa: E402
from trimtab.plan.job import Job  # noqa: E402
from trimtab.plan.layers import dequantize_scratch_bytes, workspace_bytes  # noqa: E402
from trimtab.plan.memory import predict  # noqa: E402
from trimtab.trainer.memory import LiveBytes, storage_bytes  # noqa: E402

SIZES: dict[str, Any] = {
    "family": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_layers": 6,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "tie_embeddings": True,
    "qk_norm": True,
}
SHAPE = uniform_shape(**SIZES)
LORA = LoraSettings(r=8)
NF4 = Quantization("nf4", double=True)
INT8 = Quantization("int8", block=0)
BASE = Job(
    SHAPE,
    batch=2,
    tokens=256,
    accumulation=2,
    dtype="fp32",
    weights_dtype="fp32",
    gradient_dtype="fp32",
    optimizer="adamw_torch",
    attention="sdpa_flash",
    device="cpu",
    lora=LORA,
)
HEAD_TARGETS = ("q_proj", "v_proj", "lm_head")
BF16: dict[str, Any] = {"dtype": "bf16", "weights_dtype": "bf16"}


def vary(shape: dict[str, Any] | None = None, **changes: Any) -> Job:
    return dataclasses.replace(BASE, shape=uniform_shape(**{**SIZES, **(shape or {})}), **changes)


CASES = {
    "all linear layers": BASE,
    "no accumulation": vary(accumulation=1),
    "bf16": vary(**BF16),
    "adapters in bf16": vary(**BF16, lora=LoraSettings(r=8, dtype="bf16"), optimizer="adamw_8bit"),
    "some layers": vary(lora=LoraSettings(r=8, target_modules=("q_proj", "v_proj"))),
    "no feed-forward": vary(lora=LoraSettings(r=8, target_modules=("q_proj", "k_proj", "v_proj", "o_proj"))),
    "no feed-forward, recomputed": vary(
        {"intermediate_size": 1024},
        lora=LoraSettings(r=8, target_modules=("q_proj",)),
        policies=("block",) * 6,
    ),
    "autocast, some layers": vary(
        dtype="bf16", tokens=32, lora=LoraSettings(r=8, target_modules=("q_proj", "v_proj"))
    ),
    "autocast, some layers, recomputed": vary(
        dtype="bf16",
        tokens=32,
        lora=LoraSettings(r=8, target_modules=("q_proj", "v_proj")),
        policies=("block",) * 6,
    ),
    "autocast, dropout": vary(dtype="bf16", tokens=32, lora=LoraSettings(r=8, lora_dropout=0.1)),
    "high rank": vary(lora=LoraSettings(r=32)),
    "ranks by module": vary(lora=LoraSettings(r=4, rank_pattern={"down_proj": 32})),
    "DoRA": vary(lora=LoraSettings(r=8, use_dora=True)),
    "dropout": vary(lora=LoraSettings(r=8, lora_dropout=0.1)),
    "dropout, few layers": vary(
        lora=LoraSettings(r=8, lora_dropout=0.1, target_modules=("q_proj", "v_proj"))
    ),
    "dropout, recomputed, bf16": vary(
        **BF16, lora=LoraSettings(r=8, lora_dropout=0.1), policies=("block",) * 6
    ),
    "recomputed": vary(policies=("block",) * 6),
    "selective": vary(policies=("selective",) * 6),
    "a large vocabulary": vary({"vocab_size": 40_000}),
    "the embedding fully trained": vary(lora=LoraSettings(r=8, modules_to_save=("embed_tokens",))),
    "untied, both fully trained": vary(
        {"tie_embeddings": False, "vocab_size": 2048},
        lora=LoraSettings(r=8, modules_to_save=("embed_tokens", "lm_head")),
    ),
    "a head with an adapter": vary(
        {"tie_embeddings": False, "vocab_size": 4096}, lora=LoraSettings(r=8, target_modules=HEAD_TARGETS)
    ),
    "a head with an adapter, bf16": vary(
        {"tie_embeddings": False, "vocab_size": 4096},
        **BF16,
        lora=LoraSettings(r=8, target_modules=HEAD_TARGETS),
    ),
    "a head with an adapter, a large vocabulary": vary(
        {"tie_embeddings": False, "vocab_size": 40_000}, lora=LoraSettings(r=8, target_modules=HEAD_TARGETS)
    ),
    "NF4": vary(quantization=NF4),
    "NF4, bf16, recomputed": vary(**BF16, quantization=NF4, policies=("block",) * 6),
    "INT8": vary(quantization=INT8, **BF16),
    "NF4, copies of half the layers": vary(quantization=NF4, dequantized_layers=3),
    "NF4, bf16, copies of all layers": vary(**BF16, quantization=NF4, dequantized_layers=6),
    "NF4, copies, recomputed": vary(**BF16, quantization=NF4, dequantized_layers=6, policies=("block",) * 6),
    "INT8, copies of half the layers": vary(quantization=INT8, **BF16, dequantized_layers=3),
}


@pytest.mark.parametrize("name", CASES)
def test_prediction_matches_a_real_step(name: str) -> None:
    job, memory = CASES[name], predict(CASES[name])
    step = Step(job)
    assert step.weights() == memory.before.weights
    assert storage_bytes(step.optimizer.tensors().values()) == memory.before.optimizer
    step.forward_backward()  # allocates the dequantization workspace, which persists
    for p in step.parameters.values():
        p.grad = None
    with LiveBytes() as live:
        step.forward_backward()
    assert storage_bytes(p.grad for p in step.parameters.values()) == memory.peak.gradients
    # A dispatch mode does not see allocations inside an operator.
    predicted = memory.forward_backward - workspace_bytes(job) - dequantize_scratch_bytes(job)
    assert 0.985 * live.peak <= predicted <= 1.02 * live.peak, (predicted / live.peak, memory.moments)


def test_the_comparison_can_fail() -> None:
    step = Step(BASE)
    with LiveBytes() as live:
        step.forward_backward()
    for wrong in (dataclasses.replace(BASE, lora=None), dataclasses.replace(BASE, batch=3)):
        predicted = predict(wrong).forward_backward
        assert not 0.985 * live.peak <= predicted <= 1.05 * live.peak


def test_memory_of_qlora_on_an_8b_model() -> None:
    """Published reference figures: Llama 3.1 8B, rank 16 on all linear layers, NF4."""
    llama = uniform_shape("llama", 128_256, 4096, 14_336, 32, num_heads=32, num_kv_heads=8, head_dim=128)
    job = Job(llama, batch=1, tokens=2048, accumulation=1, optimizer="adamw_torch", attention="varlen",
              device="cuda", gradient_dtype="fp32", lora=LoraSettings(r=16), quantization=NF4, **BF16)  # fmt: skip
    assert job.trained.count == 41_943_040
    memory = predict(job)
    assert memory.peak.weights / 2**30 == pytest.approx(5.31 + 0.16, abs=0.02)
    assert memory.peak.gradients == 4 * 41_943_040
    assert memory.peak.optimizer == 8 * 41_943_040
