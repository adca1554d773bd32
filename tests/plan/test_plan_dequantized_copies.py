"""Dequantized copies in the plan: as many layers as fit, more with more memory, never beyond the limit."""

from __future__ import annotations

import dataclasses
from typing import Any

import plan_jobs
import pytest
from plan_jobs import H200 as GPU
from plan_jobs import LLAMA_8B

from trimtab.adapt.spec import LoraSettings
from trimtab.adapt.spec_quantized import dequantized_bytes
from trimtab.facts.devices import DeviceFacts
from trimtab.facts.errors import RecipeError, ResourceError
from trimtab.plan import Plan, check_fits, find_max_seq_length
from trimtab.plan.dequantized_copies import add_dequantized_copies
from trimtab.plan.job import Job
from trimtab.plan.memory import predict
from trimtab.plan.memory_search import find_setting, usable_bytes
from trimtab.plan.resolved import MemoryPlan
from trimtab.plan.resolved_json import memory_from_dict
from trimtab.recipe import check_resume, loads

LAPTOP = DeviceFacts("a laptop", "cpu", 150 * 10**9)
JOB = dataclasses.replace(plan_jobs.QLORA, batch=2, tokens=2048)
RESOLVED = dataclasses.replace(
    plan_jobs.resolved_for(LLAMA_8B), lora=LoraSettings(r=16), quantization=plan_jobs.NF4
)
RECIPE = (
    "model: q\ndata: {train: x}\noptim: adamw_8bit\ndtype: bf16\nlora: {r: 16}\nload_in_4bit: true\n"
    "per_device_train_batch_size: 2\nmax_seq_length: 2048\n"
)


def plan(*overrides: str, device: DeviceFacts = GPU, memory: MemoryPlan | None = None) -> Plan:
    resolved = dataclasses.replace(RESOLVED, memory=memory)
    return plan_jobs.planned(loads(RECIPE, overrides), LLAMA_8B, device, resolved)


def chosen(job: Job, limit: int) -> Any:
    setting, fits = find_setting(job, GPU, limit)
    return add_dequantized_copies(job, setting, limit) if fits else setting


def test_more_memory_adds_more_copies() -> None:
    by_gigabytes = {}
    for gigabytes in range(10, 61, 2):
        limit = gigabytes * 10**9
        setting = chosen(JOB, limit)
        by_gigabytes[gigabytes] = setting.dequantized_layers
        job = JOB.changed(
            policies=setting.policies,
            mlp_tiles=setting.mlp_tiles,
            loss_memory=setting.loss_memory,
            dequantized_layers=setting.dequantized_layers,
        )
        assert predict(job).needed == setting.needed <= usable_bytes(job, limit) <= limit
        if setting.dequantized_layers:
            assert set(setting.policies) == {"none"}
            assert setting.mlp_tiles == 1
        if 0 < setting.dequantized_layers < 32:
            one_more = job.changed(dequantized_layers=setting.dequantized_layers + 1)
            assert predict(one_more).needed > usable_bytes(one_more, limit)
    counts = list(by_gigabytes.values())
    assert counts == sorted(counts)
    assert counts[0] == 0
    assert counts[-1] == 32
    assert len(set(counts)) > 4


def test_copies_count_as_weights() -> None:
    packed, copied = predict(JOB), predict(JOB.changed(dequantized_layers=32))
    assert copied.before.weights - packed.before.weights == dequantized_bytes(LLAMA_8B, 32, "bf16")
    # With all copies no matmul needs the workspace of one dequantized weight.
    workspace = 14_336 * 4096 * 2
    assert copied.needed - packed.needed == dequantized_bytes(LLAMA_8B, 32, "bf16") - workspace
    partial = predict(JOB.changed(dequantized_layers=31))
    assert partial.needed - packed.needed == dequantized_bytes(LLAMA_8B, 31, "bf16")
    assert dequantized_bytes(LLAMA_8B, 32, "bf16") / 2**30 == pytest.approx(13.0, abs=0.01)
    assert predict(JOB.changed(dequantized_layers=16)).before.weights == (
        (packed.before.weights + copied.before.weights) // 2
    )


@pytest.mark.parametrize(
    "job",
    [
        dataclasses.replace(JOB, quantization=None),
        dataclasses.replace(JOB, device="cpu", attention="sdpa_flash", pointwise="reference"),
    ],
    ids=["not quantized", "a CPU"],
)
def test_no_copies_without_quantization_or_gpu(job: Job) -> None:
    assert chosen(job, 140 * 10**9).dequantized_layers == 0


def test_copies_only_without_recomputation() -> None:
    for override in ("recompute={pointwise: 1}", "recompute=block", "mlp_tiles=2"):
        assert plan(override).resolved.memory_plan.dequantized_layers == 0
    for override in ("recompute=none", "gradient_checkpointing=false", "recompute=auto"):
        assert plan(override).resolved.memory_plan.dequantized_layers == 32


def test_the_plan_describes_the_copies() -> None:
    result = plan()
    assert result.job.dequantized_layers == 32
    assert result.resolved.memory_plan.description == "none in all 32 layers; weights of 32 also dequantized"
    assert result.resolved.memory_plan.reason.startswith("everything fits the")
    check_fits(result)
    assert plan("dequantized_layers=0").resolved.memory_plan.description == "none in all 32 layers"


def test_an_explicit_number_reduces_saved_activations() -> None:
    result = plan("dequantized_layers=32", "memory_limit=24GB")
    assert result.job.dequantized_layers == 32
    assert result.memory.needed <= 24 * 10**9
    assert set(result.job.layer_policies) != {"none"}
    assert result.resolved.memory_plan.description.endswith("; weights of 32 also dequantized")
    assert plan("dequantized_layers=4", "recompute=block").job.dequantized_layers == 4
    assert plan("dequantized_layers=4", device=LAPTOP).job.dequantized_layers == 4


def test_a_number_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ResourceError) as caught:
        check_fits(plan("dequantized_layers=32", "memory_limit=16GB"))
    assert "memory_limit: 16GB allows" in caught.value.cause
    assert "dequantized_layers: 0 (saves 12.9 GiB)" in (caught.value.remedy or "")
    with pytest.raises(RecipeError, match="dequantized_layers names 33 layers and the model has 32"):
        plan("dequantized_layers=33")


def test_earlier_memory_plans_have_no_copies() -> None:
    memory = {"recompute": ["none"] * 32, "mlp_tiles": 1, "loss_memory": None}
    assert plan(memory=memory_from_dict(memory)).job.dequantized_layers == 0


def test_the_longest_sequence_has_no_copies() -> None:
    limit = 24 * 10**9
    assert find_max_seq_length(JOB.changed(dequantized_layers=32), GPU, limit) == find_max_seq_length(
        JOB, GPU, limit
    )


def test_recipes() -> None:
    assert loads(RECIPE).dequantized_layers == "auto"
    for bad in ("-1", "some", "1.5", "true"):
        with pytest.raises(RecipeError, match="dequantized_layers"):
            loads(RECIPE, [f"dequantized_layers={bad}"])
    with pytest.raises(RecipeError, match="dequantized_layers: 4 has no effect without quantized weights"):
        loads(RECIPE, ["dequantized_layers=4", "load_in_4bit=false"])
    loads(RECIPE, ["dequantized_layers=0", "load_in_4bit=false"])
    loads(RECIPE, ["dequantized_layers=4", "load_in_4bit=false", "load_in_8bit=true"])
    check_resume(loads(RECIPE), loads(RECIPE, ["dequantized_layers=4"]))
