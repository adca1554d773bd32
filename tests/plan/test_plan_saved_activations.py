"""Declared saved activations of each layer under each policy against those of a real step: the same bytes.

The measurement is the live storages after each layer's forward pass. The cases are every family, method, dtype and
recompute policy; exceptions would be listed in `INEXACT` with their reason.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from plan_step import Step  # noqa: E402

from tests.kernels.triton_tools import leave_out_launches  # noqa: E402
from tests.plan.declared import blocks_by_layer, full_training  # noqa: E402
from trimtab.adapt import LoraSettings, recompute  # noqa: E402
from trimtab.adapt.spec_quantized import Quantization  # noqa: E402
from trimtab.adapt.spec_recompute import POLICIES, saved_under  # noqa: E402
from trimtab.facts.operations import BLOCK_PARTS, bytes_by_part, total_bytes  # noqa: E402
from trimtab.facts.shapes import ModelShape, uniform_shape  # noqa: E402
from trimtab.plan.job import Job  # noqa: E402
from trimtab.trainer.memory import LiveBytes  # noqa: E402

INEXACT: dict[str, str] = {}
"""Cases whose declaration may be off by at most 0.5 %, with the reason."""

SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 160, "num_layers": 3}
FAMILIES = {
    "llama": uniform_shape("llama", **SIZES, num_heads=4, num_kv_heads=2, head_dim=16),
    "llama with biases": uniform_shape(
        "llama", **SIZES, num_heads=4, num_kv_heads=2, head_dim=16, qkv_bias=True, o_bias=True, mlp_bias=True
    ),
    "mistral": uniform_shape(
        "mistral", **SIZES, num_heads=4, num_kv_heads=4, head_dim=16, sliding_window=9, num_full_layers=1
    ),
    "qwen2": uniform_shape(
        "qwen2", **SIZES, num_heads=8, num_kv_heads=1, head_dim=8, qkv_bias=True, tie_embeddings=True
    ),
    "qwen3": uniform_shape(
        "qwen3", **SIZES, num_heads=4, num_kv_heads=2, head_dim=32, qk_norm=True, tie_embeddings=True
    ),
}
LLAMA = FAMILIES["llama"].blocks[0]
FUSED = dataclasses.replace(
    LLAMA,
    mixer=dataclasses.replace(LLAMA.attention, fused_qkv=True),
    feed_forward=dataclasses.replace(LLAMA.dense, fused_gate_up=True),
)
FAMILIES["fused projections"] = dataclasses.replace(FAMILIES["llama"], blocks=(FUSED,) * 3)
NF4, INT8 = Quantization("nf4", double=True), Quantization("int8", block=0)
BF16 = {"dtype": "bf16", "weights_dtype": "bf16", "gradient_dtype": "bf16"}
LORA = LoraSettings(r=4)
SOME = LoraSettings(r=4, target_modules=r".*\.(q|qkv|down)_proj")
LAST = LoraSettings(r=4, target_modules=r".*\.layers\.[12]\..*(v|qkv|up)_proj")
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "full, bf16": BF16,
    "full, autocast": {"dtype": "bf16"},
    "LoRA": {"lora": LORA},
    "LoRA, bf16": {"lora": LORA, **BF16},
    "LoRA, autocast": {"lora": LORA, "dtype": "bf16"},
    "LoRA on some": {"lora": SOME},
    "LoRA on the last layers": {"lora": LAST},
    "LoRA with dropout": {"lora": LoraSettings(r=4, lora_dropout=0.1)},
    "LoRA with dropout, autocast": {"lora": LoraSettings(r=4, lora_dropout=0.1), "dtype": "bf16"},
    "DoRA": {"lora": LoraSettings(r=4, use_dora=True)},
    "DoRA, bf16": {"lora": LoraSettings(r=4, use_dora=True), **BF16},
    "LoRA and trained norms": {
        "lora": LoraSettings(r=4, modules_to_save=("input_layernorm", "embed_tokens"))
    },
    "NF4": {"lora": LORA, "quantization": NF4, **BF16},
    "NF4, some": {"lora": SOME, "quantization": NF4},
    "NF4, dropout": {"lora": LoraSettings(r=4, lora_dropout=0.1), "quantization": NF4},
    "NF4, DoRA": {"lora": LoraSettings(r=4, use_dora=True), "quantization": NF4},
    "INT8": {"lora": LORA, "quantization": INT8},
    "INT8, autocast": {"lora": LORA, "quantization": INT8, "dtype": "bf16"},
}


def job_of(shape: ModelShape, **changes: Any) -> Job:
    return dataclasses.replace(full_training(shape, 2, 48), **changes)


def saved_by_layer(step: Step) -> list[int]:
    """Bytes live after each layer's forward pass and not before it."""
    live, marks = LiveBytes(), []
    modules = [*step.decoder.model.layers, step.decoder.model.norm]
    hooks = [module.register_forward_pre_hook(lambda *_: marks.append(live.now)) for module in modules]
    with live:
        step.forward_backward()
    for hook in hooks:
        hook.remove()
    step.decoder.zero_grad(set_to_none=True)
    return [after - before for before, after in itertools.pairwise(marks)]


def compare(name: str, job: Job) -> None:
    step = Step(job)
    for tiles in (1, 3) if job.shape.family in ("llama", "qwen3") else (1,):
        blocks = blocks_by_layer(job.changed(mlp_tiles=tiles))
        for policy in POLICIES:
            recompute.apply(step.decoder, [policy] * job.shape.num_layers, mlp_tiles=tiles)
            declared = [total_bytes(saved_under(block, policy)) for block in blocks]
            real = saved_by_layer(step)
            case = f"{name}, {policy}, {tiles} tiles"
            if case in INEXACT:
                assert declared == pytest.approx(real, rel=0.005), case
            else:
                assert declared == real, case


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_declared_bytes_match_a_real_step(family: str, method: str) -> None:
    compare(f"{family}, {method}", job_of(FAMILIES[family], **METHODS[method]))


@pytest.mark.parametrize("method", ["full", "full, bf16", "LoRA, bf16", "LoRA on some", "NF4", "NF4, DoRA"])
@pytest.mark.parametrize("family", ["llama with biases", "qwen3", "fused projections"])
def test_declared_bytes_of_fused_kernels(family: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_out_launches(monkeypatch)
    compare(f"{family}, {method}, fused", job_of(FAMILIES[family], **METHODS[method], pointwise="triton"))


@pytest.mark.parametrize("attention", ["reference", "sdpa_math"])
def test_declared_bytes_of_attention_matrices(attention: str) -> None:
    for method in ("full", "full, bf16", "LoRA"):
        job = job_of(FAMILIES["qwen2"], **METHODS[method], attention=attention)
        compare(f"qwen2, {method}, {attention}", job)


def test_the_comparison_can_fail() -> None:
    job = job_of(FAMILIES["llama"])
    wrong = dataclasses.replace(job, shape=FAMILIES["mistral"])
    real = saved_by_layer(Step(job))
    assert [total_bytes(saved_under(block, "none")) for block in blocks_by_layer(wrong)] != real


def test_layers_may_differ() -> None:
    """A narrow feed-forward in one layer, and wider heads in another."""
    blocks = list(FAMILIES["llama"].blocks)
    blocks[1] = dataclasses.replace(blocks[1], feed_forward=dataclasses.replace(blocks[1].dense, width=32))
    blocks[2] = dataclasses.replace(blocks[2], mixer=dataclasses.replace(blocks[2].attention, head_dim=32))
    shape = dataclasses.replace(FAMILIES["llama"], blocks=tuple(blocks))
    job = job_of(shape)
    declared = [total_bytes(saved_under(block, "none")) for block in blocks_by_layer(job)]
    assert declared == saved_by_layer(Step(job))
    assert len(set(declared)) == 3


@pytest.mark.parametrize("method", ["full", "full, bf16", "LoRA"])
def test_layers_may_have_different_attention_backends(method: str) -> None:
    backends = ("sdpa_flash", "reference", "sdpa_math")  # the last two layers have a window
    job = job_of(FAMILIES["mistral"], **METHODS[method], attention=backends[0], layer_attention=backends)
    compare(f"mistral, {method}, {', '.join(backends)}", job)


def test_parts_add_up() -> None:
    for block in blocks_by_layer(job_of(FAMILIES["qwen3"])):
        saved = saved_under(block, "none")
        parts = bytes_by_part(saved)
        assert sum(parts.values()) == total_bytes(saved)
        assert all(parts[part] for part in BLOCK_PARTS)
