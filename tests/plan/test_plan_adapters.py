"""Plans of runs that train adapters, against what a real step holds: weights by kind, trained parts, activations."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from trimtab import optim  # noqa: E402
from trimtab.adapt import (  # noqa: E402
    LoraSettings,
    add_adapters,
    init_adapters,
    quantize_layout,
    recompute,
    trained_parameters,
)
from trimtab.adapt.lora import set_masks  # noqa: E402
from trimtab.facts.dtypes import TORCH_NAMES  # noqa: E402
from trimtab.facts.shapes import ModelShape  # noqa: E402
from trimtab.kernels.attention import Layout  # noqa: E402
from trimtab.model import build, init_weights  # noqa: E402
from trimtab.plan.memory import Job, predict  # noqa: E402
from trimtab.trainer.memory import LiveBytes, storage_bytes  # noqa: E402

SHAPE = ModelShape(
    "qwen3", 512, 64, 192, 6, num_heads=4, num_kv_heads=2, head_dim=32, tie_embeddings=True, qk_norm=True
)
LORA = LoraSettings(r=8)
NF4 = {"kind": "nf4", "block": 64, "double": True, "impl": "reference"}
INT8 = {"kind": "int8", "block": 0, "double": False, "impl": "reference"}
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
BF16: dict[str, Any] = {"dtype": "bf16", "weights_dtype": "bf16"}


def vary(shape: dict[str, Any] | None = None, **changes: Any) -> Job:
    return dataclasses.replace(BASE, shape=dataclasses.replace(SHAPE, **(shape or {})), **changes)


CASES = {
    "all linear layers": BASE,
    "no accumulation": vary(accumulation=1),
    "bf16": vary(**BF16),
    "adapters in bf16": vary(**BF16, lora=LoraSettings(r=8, dtype="bf16"), optimizer="adamw_8bit"),
    "some layers": vary(lora=LoraSettings(r=8, target_modules=("q_proj", "v_proj"))),
    "no feed-forward": vary(lora=LoraSettings(r=8, target_modules=("q_proj", "k_proj", "v_proj", "o_proj"))),
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
    "the embedding trained whole": vary(lora=LoraSettings(r=8, modules_to_save=("embed_tokens",))),
    "untied, both trained whole": vary(
        {"tie_embeddings": False, "vocab_size": 2048},
        lora=LoraSettings(r=8, modules_to_save=("embed_tokens", "lm_head")),
    ),
    "NF4": vary(quantization=NF4),
    "NF4, bf16, recomputed": vary(**BF16, quantization=NF4, policies=("block",) * 6),
    "INT8": vary(quantization=INT8, **BF16),
}


class Step:
    """A model with adapters and its optimizer, and one training step."""

    def __init__(self, job: Job) -> None:
        self.job = job
        assert job.lora is not None
        decoder = build(job.shape, dtype=job.weights_dtype, device="meta", attention=job.attention)
        if job.quantization is not None:
            kind, block = job.quantization["kind"], job.quantization["block"] or 64
            quantize_layout(decoder, kind, block=block, double=job.quantization["double"], device=job.device)
        add_adapters(decoder, job.lora)
        recompute.apply(decoder, job.layers, mlp_tiles=job.mlp_tiles)
        self.decoder = init_weights(decoder.to_empty(device=job.device), 0)
        init_adapters(self.decoder, seed=0)
        set_masks(self.decoder, torch.device(job.device))
        self.parameters = trained_parameters(self.decoder)
        for p in self.parameters.values():
            if p.dtype == torch.bfloat16:
                p.grad_dtype = getattr(torch, TORCH_NAMES[job.gradient_dtype])
        self.optimizer = optim.build(job.optimizer, self.parameters.items(), lr=1e-4, seed=0)

    def weights(self) -> int:
        return storage_bytes([*self.decoder.parameters(), *self.decoder.buffers()])

    def forward_backward(self) -> None:
        job = self.job
        for _ in range(job.accumulation):
            ids_BT = torch.randint(0, job.shape.vocab_size, (job.batch, job.tokens), device=job.device)
            positions_BT = torch.arange(job.tokens, device=job.device).expand(job.batch, -1).contiguous()
            layout = Layout.packed((positions_BT >= job.tokens // 2).int())
            self.decoder.loss(ids_BT, ids_BT.clone(), positions_BT, layout).backward()


@pytest.mark.parametrize("name", CASES)
def test_predicted_is_what_a_step_holds(name: str) -> None:
    job, memory = CASES[name], predict(CASES[name])
    step = Step(job)
    assert step.weights() == memory.before.weights
    assert storage_bytes(step.optimizer.tensors().values()) == memory.before.optimizer
    step.forward_backward()  # the workspace of packed weights stays once it has grown
    for p in step.parameters.values():
        p.grad = None
    with LiveBytes() as live:
        step.forward_backward()
    assert storage_bytes(p.grad for p in step.parameters.values()) == memory.peak.gradients
    predicted = max(v for k, v in memory.moments.items() if k != "the optimizer step")
    assert 0.985 * live.peak <= predicted <= 1.05 * live.peak, (predicted / live.peak, memory.moments)


def test_the_comparison_can_fail() -> None:
    step = Step(BASE)
    with LiveBytes() as live:
        step.forward_backward()
    for wrong in (dataclasses.replace(BASE, lora=None), dataclasses.replace(BASE, batch=3)):
        predicted = max(predict(wrong).moments.values())
        assert not 0.985 * live.peak <= predicted <= 1.05 * live.peak


def test_what_lora_saves_on_an_8b_model() -> None:
    """The figures people plan by: Llama 3.1 8B, rank 16 on all linear layers, NF4."""
    llama = ModelShape("llama", 128_256, 4096, 14_336, 32, num_heads=32, num_kv_heads=8, head_dim=128)
    job = Job(llama, batch=1, tokens=2048, accumulation=1, optimizer="adamw_torch", attention="varlen",
              device="cuda", gradient_dtype="fp32", lora=LoraSettings(r=16), quantization=NF4, **BF16)  # fmt: skip
    assert job.trained.count == 41_943_040
    memory = predict(job)
    assert memory.peak.weights / 2**30 == pytest.approx(5.31 + 0.16, abs=0.02)
    assert memory.peak.gradients == 4 * 41_943_040
    assert memory.peak.optimizer == 8 * 41_943_040
