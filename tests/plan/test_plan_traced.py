"""The predicted peak against the storages of a real step; on a GPU, against its allocator's peak."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from plan_step import Step  # noqa: E402

from trimtab.adapt import (  # noqa: E402
    LoraSettings,
    workspace,
)
from trimtab.adapt.spec_quantized import Quantization  # noqa: E402
from trimtab.facts.dtypes import nbytes  # noqa: E402
from trimtab.facts.shapes import uniform_shape  # noqa: E402
from trimtab.plan.job import Job  # noqa: E402
from trimtab.plan.layers import dequantize_scratch_bytes, workspace_bytes  # noqa: E402
from trimtab.plan.memory import Moment, Phase, predict  # noqa: E402
from trimtab.trainer.memory import LiveBytes, storage_bytes  # noqa: E402

SIZES: dict[str, Any] = {
    "family": "qwen3",
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "tie_embeddings": True,
    "qk_norm": True,
}
TINY = uniform_shape(**SIZES)
BASE = Job(
    TINY,
    batch=2,
    tokens=128,
    accumulation=2,
    dtype="fp32",
    weights_dtype="fp32",
    gradient_dtype="fp32",
    optimizer="adamw_torch",
    attention="sdpa_flash",
    device="cpu",
)


def vary(shape: dict | None = None, **changes: object) -> Job:
    return dataclasses.replace(BASE, shape=uniform_shape(**{**SIZES, **(shape or {})}), **changes)


SHORT = {"batch": 1, "tokens": 32}
WIDE = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 1024}
FEW = {"vocab_size": 64}  # so that the peak is in a layer
NARROW = FEW | {"intermediate_size": 128, "qk_norm": False}  # and in its attention half
TILES = {"mlp_tiles": 16, "tokens": 512}
BF16 = {"dtype": "bf16", "weights_dtype": "bf16", "gradient_dtype": "bf16", "optimizer": "adamw_8bit"}
CASES = {
    "plain": BASE,
    "no accumulation": vary(accumulation=1),
    "untied": vary({"tie_embeddings": False}),
    "untied, no accumulation": vary({"tie_embeddings": False}, accumulation=1),
    "attention matrices": vary(attention="reference", batch=1, tokens=512),
    "recomputed": vary(policies=("block",) * 4),
    "pointwise": vary(FEW, policies=("pointwise",) * 4),
    "selective": vary(FEW, policies=("selective",) * 4),
    "selective, no accumulation": vary(FEW, policies=("selective",) * 4, accumulation=1),
    "a mix": vary(FEW, policies=("offload", "block", "selective", "none")),
    "a mix, highest memory first": vary(FEW, policies=("none", "pointwise", "block", "selective")),
    "recomputed, in tiles": vary(FEW, policies=("block",) * 4, mlp_tiles=4, tokens=512),
    "recomputed, in tiles, few tokens": vary(FEW, policies=("block",) * 4, mlp_tiles=4),
    "selective, in tiles": vary(FEW, policies=("selective",) * 4, mlp_tiles=3),
    "saved, in tiles": vary(FEW, mlp_tiles=8, tokens=512),
    "in tiles, bf16": vary(FEW, mlp_tiles=4, tokens=512, policies=("block",) * 4, **BF16),
    "narrow, in tiles, bf16": vary(NARROW, **TILES, policies=("block",) * 4, **BF16),
    "narrow, selective, in tiles, bf16": vary(NARROW, **TILES, policies=("selective",) * 4, **BF16),
    "narrow, saved, in tiles, bf16": vary(NARROW, **TILES, **BF16),
    "narrow, in tiles, autocast": vary(NARROW, **TILES, policies=("block",) * 4, dtype="bf16"),
    "narrow, selective, in tiles, autocast": vary(NARROW, **TILES, policies=("selective",) * 4, dtype="bf16"),
    "bf16": vary(**BF16),
    "bf16, fp32 gradients": vary(dtype="bf16", weights_dtype="bf16", optimizer="adamw_bf16"),
    "autocast": vary(dtype="bf16"),
    "autocast, recomputed": vary(FEW, dtype="bf16", policies=("block",) * 4),
    "autocast, pointwise": vary(FEW, dtype="bf16", policies=("pointwise",) * 4),
    "autocast, few tokens, recomputed": vary(WIDE, batch=1, tokens=16, dtype="bf16", policies=("block",) * 4),
    "small vocabulary": vary({"vocab_size": 64}),
    "small vocabulary, recomputed": vary({"vocab_size": 64, "num_layers": 8}, policies=("block",) * 8),
    "large vocabulary, untied": vary({"vocab_size": 32_768, "tie_embeddings": False}, **SHORT),
    "large vocabulary": vary({"vocab_size": 32_768}, **SHORT),
    "logits twice": vary({"vocab_size": 40_000, "tie_embeddings": False}),
    "logits twice, bf16": vary(
        {"vocab_size": 40_000, "tie_embeddings": False},
        **BF16,
    ),
    "few tokens": vary(WIDE, batch=1, tokens=16),
    "few tokens, no accumulation": vary(WIDE, batch=1, tokens=16, accumulation=1),
    "optimizer in backward": vary(accumulation=1, in_backward=True),
    "optimizer in backward, untied": vary({"tie_embeddings": False}, accumulation=1, in_backward=True),
    "optimizer in backward, few tokens": vary(WIDE, batch=1, tokens=16, accumulation=1, in_backward=True),
}


ADAPTED = {"lora": LoraSettings(r=4), "accumulation": 1}
LARGE = {"lora": LoraSettings(r=32), "accumulation": 1}
NF4 = {"quantization": Quantization("nf4", double=True)}
CASES |= {
    "adapters": vary(FEW, **ADAPTED),
    "adapters, whole vocabulary": vary(**ADAPTED),
    "adapters, recomputed": vary(FEW, **ADAPTED, policies=("block",) * 4),
    "adapters, a mix": vary(FEW, **ADAPTED, policies=("block", "selective", "pointwise", "none")),
    "adapters, in tiles": vary(FEW, **ADAPTED, policies=("block",) * 4, tokens=512, mlp_tiles=4),
    "large adapters": vary(FEW, **LARGE),
    "large adapters, pointwise": vary(FEW, **LARGE, policies=("pointwise",) * 4),
    "large adapters, pointwise, in tiles": vary(
        FEW, **LARGE, policies=("pointwise",) * 4, mlp_tiles=4, tokens=512
    ),
    "large adapters, selective": vary(FEW, **LARGE, policies=("selective",) * 4),
    "large adapters, recomputed": vary(FEW, **LARGE, policies=("block",) * 4),
    "large adapters, packed, pointwise": vary(FEW, **LARGE, **NF4, policies=("pointwise",) * 4),
    "few adapters": vary(FEW, lora=LoraSettings(r=4, target_modules=("q_proj", "v_proj"))),
    "DoRA": vary(FEW, lora=LoraSettings(r=4, use_dora=True), accumulation=1),
    "packed": vary(FEW, **ADAPTED, **NF4),
    "packed, recomputed": vary(FEW, **ADAPTED, **NF4, policies=("block",) * 4),
    "packed, recomputed, in tiles": vary(
        FEW, **ADAPTED, **NF4, policies=("block",) * 4, mlp_tiles=8, tokens=1024
    ),
}


LAST = {"lora": LoraSettings(r=4, target_modules=r".*\.layers\.[23]\..*proj"), "accumulation": 1}
AUTOCAST = {**ADAPTED, "dtype": "bf16"}
CASES |= {
    "adapters on the last layers": vary(FEW, **LAST),
    "adapters on the last layers, recomputed": vary(FEW, **LAST, policies=("block",) * 4),
    "adapters on the last layers, packed": vary(FEW, **LAST, **NF4, policies=("block",) * 4),
    "adapters on the last layers, in tiles": vary(
        FEW, **LAST, policies=("block",) * 4, mlp_tiles=4, tokens=512
    ),
    "adapters, autocast": vary(FEW, **AUTOCAST),
    "adapters, autocast, whole vocabulary": vary(**AUTOCAST),
    "adapters, autocast, recomputed": vary(FEW, **AUTOCAST, policies=("block",) * 4),
    "adapters, autocast, selective": vary(FEW, **AUTOCAST, policies=("selective",) * 4),
    "adapters, autocast, few tokens": vary(WIDE, **AUTOCAST, batch=1, tokens=16),
    "narrow, selective, in tiles, bf16, no accumulation": vary(
        NARROW, **TILES, policies=("selective",) * 4, accumulation=1, **BF16
    ),
    "narrow, saved, in tiles, bf16, no accumulation": vary(NARROW, **TILES, accumulation=1, **BF16),
}


@pytest.mark.parametrize("name", CASES)
def test_predicted_peak_matches_a_real_step(name: str) -> None:
    job, memory = CASES[name], predict(CASES[name])
    step = Step(job)
    assert step.weights() == memory.before.weights
    workspace.release()  # a workspace left by an earlier case would not be measured
    assert storage_bytes(step.optimizer.tensors().values()) == memory.before.optimizer
    with LiveBytes() as live:
        step.forward_backward()
    assert storage_bytes(p.grad for p in step.decoder.parameters()) == memory.peak.gradients
    moments = {k: v for k, v in memory.moments.items() if k.phase is not Phase.OPTIMIZER_STEP}
    if job.shape.tie_embeddings:
        # Under a dispatch mode autograd adds a tied embedding's two gradients into a third tensor, otherwise
        # in place; only this measurement pays for it.
        copy = nbytes(job.gradient_dtype, job.shape.vocab_size * job.shape.hidden_size)
        if job.gradient_dtype != job.weights_dtype:
            copy -= nbytes(job.weights_dtype, job.shape.vocab_size * job.shape.hidden_size)
        moments[Moment(Phase.EMBEDDING_BACKWARD)] += copy
    # A dispatch mode does not see allocations inside an operator.
    predicted = max(moments.values()) - workspace_bytes(job) - dequantize_scratch_bytes(job)
    assert live.peak == pytest.approx(predicted, rel=0.005)


def test_the_comparison_can_fail() -> None:
    step = Step(CASES["plain"])
    with LiveBytes() as live:
        step.forward_backward()
    wrong = predict(dataclasses.replace(CASES["plain"], batch=3))
    assert live.peak != pytest.approx(wrong.forward_backward, rel=0.03)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["none", "pointwise", "selective", "block", "offload"])
@pytest.mark.parametrize("gradients", ["bf16", "fp32"])
@pytest.mark.parametrize("loss", ["chunked", "triton, fast", "triton, low memory"])
def test_predicted_peak_on_a_gpu(policy: str, gradients: str, loss: str) -> None:
    shape = uniform_shape("qwen3", 151_936, 1024, 3072, 28, num_heads=16, num_kv_heads=8, head_dim=128,
                       tie_embeddings=True, qk_norm=True)  # fmt: skip
    formats = {"dtype": "bf16", "weights_dtype": "bf16", "gradient_dtype": gradients, "bf16": True}
    ours = loss != "chunked"
    kernels = {"attention": "triton" if ours else "varlen", "loss_impl": loss.split(",")[0]}
    kernels |= dict.fromkeys(("optimizer_impl", "pointwise"), "triton" if ours else "reference")
    job = Job(shape, batch=4, tokens=1024, accumulation=2, optimizer="adamw_8bit", device="cuda",
              policies=(policy,) * 28, loss_memory=1300 * 2**20 if loss == "triton, fast" else None,
              **formats, **kernels)  # fmt: skip
    gc.collect()  # tensors of earlier tests in reference cycles would count as persistent
    step, memory = Step(job), predict(job)
    step.forward_backward()
    step.optimizer.step(lr=1e-4)
    for p in step.decoder.parameters():
        p.grad = None
    torch.cuda.synchronize()
    persistent = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step.forward_backward()
    measured = torch.cuda.max_memory_allocated() - persistent
    step.optimizer.step(lr=1e-4)
    update = torch.cuda.max_memory_allocated() - persistent
    predicted = memory.forward_backward
    print(
        f"\n{policy}, {gradients}, {loss}: persistent {persistent:,}, step {measured:,}, update {update:,}; "
        f"predicted {predicted:,} {memory.moments}"
    )
    assert persistent == pytest.approx(memory.before.total, rel=0.05)
    assert measured == pytest.approx(predicted, rel=0.05)
