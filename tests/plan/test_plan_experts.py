"""Plans of models that trimtab cannot train yet: mixtures of experts, latent attention, uncommon dense models."""

from __future__ import annotations

import dataclasses
import math
import time

import pytest
from plan_jobs import FULL, H200, NF4

from trimtab.adapt import spec as adapt_spec
from trimtab.adapt import spec_quantized
from trimtab.adapt.spec import LoraSettings
from trimtab.adapt.targets import select
from trimtab.facts.calibration import Calibration
from trimtab.facts.operations import OperationKind
from trimtab.facts.shapes import ModelShape
from trimtab.model.catalogue import find_model
from trimtab.model.spec import product_flops
from trimtab.plan import make_plan
from trimtab.plan.attention import attention_table
from trimtab.plan.job import Job
from trimtab.plan.layers import declared_blocks
from trimtab.plan.memory import predict
from trimtab.plan.step_time import step_time
from trimtab.plan.time import flops_per_token
from trimtab.recipe import loads
from trimtab.run.resolve import resolve_recipe
from trimtab.run.target import read_target

WITH_EXPERTS = (
    "mistralai/Mixtral-8x7B-v0.1",
    "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen1.5-MoE-A2.7B",
    "deepseek-ai/DeepSeek-V2-Lite",
    "deepseek-ai/DeepSeek-V3",
    "openai/gpt-oss-20b",
)
DENSE = (
    "google/gemma-2-2b",
    "google/gemma-3-1b-it",
    "microsoft/Phi-3-mini-4k-instruct",
    "microsoft/Phi-4-mini-instruct",
    "allenai/OLMo-2-0425-1B",
    "ibm-granite/granite-4.1-3b",
    "zai-org/GLM-4-9B-0414",
    "HuggingFaceTB/SmolLM3-3B",
)
LORA = LoraSettings(r=16)


def shape_of(name: str) -> ModelShape:
    entry = find_model(name)
    assert entry is not None
    return entry.shape


def job_of(name: str, method: str = "full", **changes: object) -> Job:
    lora = None if method == "full" else LORA
    quantization = NF4 if method == "nf4" else None
    job = dataclasses.replace(
        FULL, shape=shape_of(name), batch=1, tokens=2048, lora=lora, quantization=quantization
    )
    return dataclasses.replace(job, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*WITH_EXPERTS, *DENSE])
def test_weights_are_all_parameters(name: str) -> None:
    """A token uses a few experts; all experts are in memory."""
    shape = shape_of(name)
    assert predict(job_of(name)).peak.weights == 2 * shape.num_parameters
    assert predict(job_of(name)).peak.gradients == 2 * shape.num_parameters
    adapters = 4 * sum(math.prod(dims) for _, dims in adapt_spec.adapter_parameters(shape, LORA))
    assert predict(job_of(name, "lora")).peak.weights == 2 * shape.num_parameters + adapters
    packed = spec_quantized.packed_linears(shape)
    quantized = sum(linear.weights for linear in packed.values())
    expected = 2 * (shape.num_parameters - quantized) + quantized * NF4.bytes_per_weight + adapters
    assert predict(job_of(name, "nf4")).peak.weights == pytest.approx(
        expected, rel=2e-3
    )  # each small matrix has a table


@pytest.mark.parametrize("name", [*WITH_EXPERTS, *DENSE])
def test_flops_follow_active_parameters(name: str) -> None:
    """Six per active parameter and token, and attention."""
    shape, job = shape_of(name), job_of(name)
    attention = sum(
        len(layers) * (operation.forward.flops + operation.backward.flops)
        for block, layers in declared_blocks(job)
        for operation in block.operations
        if operation.kind is OperationKind.ATTENTION
    )
    products = flops_per_token(job) - attention / job.tokens
    head = shape.vocab_size * shape.hidden_size
    assert products == pytest.approx(3 * product_flops(shape) + 6 * head)
    embedding = 0 if shape.tie_embeddings else head
    assert products == pytest.approx(6 * (shape.num_active_parameters - embedding), rel=0.01)


@pytest.mark.parametrize("method", ["full", "lora", "nf4"])
@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_recomputation_saves_memory_in_every_method(name: str, method: str) -> None:
    num_layers = shape_of(name).num_layers
    activations = {
        policy: predict(
            job_of(name, method, policies=(policy,) * num_layers, accumulation=2)
        ).peak.activations
        for policy in ("none", "pointwise", "selective", "block")
    }
    assert (
        activations["none"] > activations["pointwise"] >= activations["selective"] >= activations["block"] > 0
    )
    tiled = predict(job_of(name, method, policies=("block",) * num_layers, mlp_tiles=8)).peak
    assert tiled.weights == predict(job_of(name, method)).peak.weights


def test_saved_activations_grow_with_active_experts() -> None:
    """Rows are copied for each active expert of a token."""
    shape = shape_of("Qwen/Qwen3-30B-A3B")
    block = shape.blocks[0]
    twice = dataclasses.replace(
        shape,
        blocks=(dataclasses.replace(block, feed_forward=dataclasses.replace(block.feed_forward, active=16)),) * 48,
    )  # fmt: skip
    small, large = (
        predict(job_of("Qwen/Qwen3-30B-A3B", shape=variant, accumulation=2)).peak
        for variant in (shape, twice)
    )
    assert small.weights == large.weights
    rows = 2048 * 8
    # Rows, gate, up, the gated activation and the outputs of 8 more experts per token, in bf16, with the fused gate.
    per_layer = rows * 2 * (2 * 2048 + 3 * 768)
    assert large.activations - small.activations == pytest.approx(48 * per_layer, rel=0.02)


def test_adapters_target_each_expert_and_no_router() -> None:
    shape = shape_of("Qwen/Qwen3-30B-A3B")
    targets = select(shape, "all-linear")
    assert not any(matrix.name.endswith("mlp.gate") for matrix in targets)
    up = next(matrix for matrix in targets if matrix.name.endswith("experts.up_proj"))
    assert (up.count, up.out_features, up.in_features) == (128, 768, 2048)
    dims = dict(adapt_spec.adapter_parameters(shape, LORA))
    assert dims[f"{up.name}.lora_A.default.weight"] == (128, 16, 2048)
    assert dims[f"{up.name}.lora_B.default.weight"] == (128, 768, 16)
    only = [matrix.name for matrix in select(shape, ["q_proj", "v_proj"])]
    assert len(only) == 2 * 48


@pytest.mark.parametrize("method", ["", "lora: {r: 16}\n", "lora: {r: 16}\nload_in_4bit: true\n"])
@pytest.mark.parametrize(
    "name", ["deepseek-ai/DeepSeek-V3", "openai/gpt-oss-20b", "google/gemma-3-4b-it", "microsoft/phi-4"]
)
def test_a_whole_plan_takes_seconds(name: str, method: str) -> None:
    """Every `auto` resolved, memory and time; 58 layers of 256 experts too."""
    recipe = loads(f"model: q\ndata: {{train: x}}\nmax_seq_length: 4096\n{method}")
    device, shape = dataclasses.replace(H200, memory_bytes=20 * 10**12), shape_of(name)
    start = time.perf_counter()
    plan = make_plan(recipe, shape, resolve_recipe(recipe, shape, device, threads=4), device=device)
    assert time.perf_counter() - start < 30  # 2 s alone on two cores
    assert plan.memory.peak.total > plan.memory.peak.weights > 0
    assert plan.time.flops_per_token > 0


def test_alternating_layers_share_declared_blocks() -> None:
    declared = declared_blocks(job_of("google/gemma-2-2b"))
    assert len(declared) == 26
    assert len({id(block) for block, _ in declared}) == 2


def test_attention_with_a_separate_value_head_size() -> None:
    (row,) = attention_table(shape_of("deepseek-ai/DeepSeek-V3"), batch=1, lengths=[1024])
    assert row.flash == 61 * 1024 * (128 * 128 * 2 + 128 * 4)


@pytest.mark.parametrize("method", ["full", "lora", "nf4"])
def test_time_of_a_step_follows_active_parameters(method: str) -> None:
    """A mixture of 30B, of which 3B are active, takes longer than a dense 1.7B and less than a dense 14B."""
    calibration = Calibration("NVIDIA H200", {"bf16": 7e14}, 4.2e12, 5e-6)
    device = dataclasses.replace(H200, calibration=calibration)
    names = ("Qwen/Qwen3-1.7B", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-14B")
    steps = [step_time(job_of(name, method, batch=4), device, graphs=True) for name in names]
    small, mixture, large = (entry.seconds for entry in steps if entry is not None)
    assert small < mixture < large
    deepseek = step_time(job_of("deepseek-ai/DeepSeek-V3", method), device)
    assert deepseek is not None
    assert math.isfinite(deepseek.seconds)
    assert {"mlp.dispatch", "mlp.combine", "rope"} <= {entry.name for entry in deepseek.operations}


def test_times_of_untrainable_models_are_labelled() -> None:
    experts = read_target("Qwen/Qwen3-30B-A3B", gpu="h200", method="lora").plan.time
    assert experts.tokens_per_second is not None
    assert not experts.validated
    assert experts.basis == ("measured on an NVIDIA H200; not validated: trimtab cannot train this model yet")
    assert experts.to_dict()["validated"] is False
    assert read_target("Qwen/Qwen3-8B", gpu="h200", method="lora").plan.time.validated
    unpublished = read_target("Qwen/Qwen3-8B", gpu="apple-m4-max-64gb", method="lora").plan.time
    assert unpublished.basis == "no bf16 rate of Apple M4 Max is published"
