"""Memory of the phases of a run, whether it fits, and what the error says of the phase that does not."""

from __future__ import annotations

import dataclasses
import json

import pytest
from plan_jobs import LLAMA_8B, QWEN

from trimtab.checkpoint import spec as checkpoint_spec
from trimtab.facts.blocks import ExpertsShape, LatentAttentionShape
from trimtab.facts.devices import DeviceFacts
from trimtab.facts.errors import ResourceError
from trimtab.facts.operations import Part
from trimtab.facts.phases import OWN_STEP, RunPhase
from trimtab.facts.shapes import ModelShape
from trimtab.plan import Plan, check_fits, make_plan
from trimtab.plan.inference import cache_tokens
from trimtab.plan.memory import OUTSIDE
from trimtab.plan.phases import AFTERWARDS, PHASE_REMEDIES
from trimtab.recipe import loads
from trimtab.run.resolve import resolve_recipe

LLAMA = dataclasses.replace(LLAMA_8B, max_positions=131_072)
QLORA = "load_in_4bit: true\nlora: {r: 16}\nmax_seq_length: 8192\nper_device_train_batch_size: 1\nrecompute: offload"
GIB = 2**30


def gpu(memory: float) -> DeviceFacts:
    return DeviceFacts(
        "a GPU", "cuda", int(memory * GIB), capability=(9, 0), bf16=True, host_free_bytes=100 * GIB
    )


def plan(shape: ModelShape, keys: str, device: DeviceFacts) -> Plan:
    recipe = loads(f"model: a\ndata: {{train: x, eval_share: 0.1}}\n{keys}")
    return make_plan(recipe, shape, resolve_recipe(recipe, shape, device, threads=8), device=device)


PLANNED = [phase for phase in RunPhase if phase not in (RunPhase.DATA, RunPhase.OTHER)]


def test_phases_of_a_run_in_order() -> None:
    phases = plan(QWEN, 'prompts: ["1 + 1 ="]', gpu(80)).phases
    names = [one.phase for one in phases.phases]
    assert names == [one for one in PLANNED if one is not RunPhase.MERGE]
    assert [one.phase for one in phases.during_run] == names[:-1]
    adapted = plan(LLAMA, QLORA, gpu(80)).phases
    assert {one.phase for one in adapted.phases} == {*PLANNED} - {RunPhase.EXPORT, RunPhase.GENERATION}
    assert adapted.of(RunPhase.GENERATION) is None


def test_steps_hold_what_is_predicted() -> None:
    made = plan(QWEN, "max_seq_length: 1024", gpu(80))
    step = [one for one in made.phases.phases if one.phase in OWN_STEP]
    assert max(one.needed for one in step) == made.memory.needed
    for one in step:
        assert one.buckets.total + OUTSIDE["cuda"] == one.needed
        if one.phase is not RunPhase.OPTIMIZER_STEP:
            assert sum((one.parts or {}).values()) == one.buckets.activations


def test_no_gradients_and_little_memory_in_evaluation() -> None:
    phases = plan(QWEN, "max_seq_length: 1024\nper_device_train_batch_size: 8", gpu(80)).phases
    evaluation, backward = phases.of(RunPhase.EVALUATION), phases.of(RunPhase.BACKWARD)
    assert evaluation is not None
    assert backward is not None
    assert evaluation.buckets.gradients == 0
    assert evaluation.buckets.activations < backward.buckets.activations / 2


def test_generation_may_exceed_training_and_is_named() -> None:
    """64 answers at once of an 8B model: 2 GiB of keys and values."""
    made = plan(LLAMA, f"{QLORA}\nanswers: 100\nmemory_limit: 9GiB", gpu(80))
    generation = made.phases.of(RunPhase.GENERATION)
    assert generation is not None
    cache = 2 * 64 * cache_tokens(64, 128, 192) * 8 * 128 * 2 * 32
    assert cache == 2 * GIB
    assert generation.buckets.activations > cache
    assert made.phases.peak is generation
    assert made.memory.needed <= 9 * GIB < generation.needed
    with pytest.raises(ResourceError) as refused:
        check_fits(made)
    assert "generation of samples needs" in refused.value.cause
    assert "answers" in refused.value.remedy
    check_fits(plan(LLAMA, f"{QLORA}\nmemory_limit: 9GiB", gpu(80)))
    check_fits(plan(LLAMA, f"{QLORA}\nanswers: 100\nmemory_limit: 12GiB", gpu(80)))


def test_every_phase_that_can_be_refused_has_a_remedy() -> None:
    assert {*PHASE_REMEDIES} == {*PLANNED} - {*OWN_STEP, *AFTERWARDS}


def test_host_memory_of_checkpoints_and_offloading() -> None:
    made = plan(LLAMA, QLORA, gpu(80))
    checkpoint, forward = made.phases.of(RunPhase.CHECKPOINT), made.phases.of(RunPhase.FORWARD)
    assert checkpoint is not None
    assert forward is not None
    largest = max(parameter.count for parameter in made.job.trained.parameters) * 4
    copy = checkpoint_spec.host_bytes(made.disk.checkpoint_bytes, largest)
    assert checkpoint.host - forward.host == copy
    assert forward.host > made.memory.host == 32 * 8192 * 4096 * 2
    assert made.phases.host == checkpoint.host


def test_on_a_cpu_host_and_device_are_the_same_memory() -> None:
    laptop = DeviceFacts("a laptop", "cpu", 64 * GIB)
    made = plan(QWEN, "max_seq_length: 256\nsave_steps: null", laptop)
    step = made.phases.of(RunPhase.BACKWARD)
    checkpoint = made.phases.of(RunPhase.CHECKPOINT)
    assert step is not None
    assert checkpoint is not None
    assert step.needed == step.host >= step.buckets.total + OUTSIDE["cpu"]
    assert checkpoint.buckets == made.memory.before, "it is saved when the last step is done"
    often = plan(QWEN, "max_seq_length: 256\nsave_steps: 10", laptop).phases.of(RunPhase.CHECKPOINT)
    assert often is not None
    assert often.buckets == made.memory.peak, "a thread writes while training goes on"


def test_plain_data() -> None:
    made = plan(LLAMA, QLORA, gpu(80)).phases.to_dict()
    assert json.loads(json.dumps(made)) == made
    places = [point["at"] for point in made["timeline"]]
    assert places == sorted(places)
    assert len(places) < 20, "the points of equal layers lie on a line"
    assert places[-1] == 2 * 32 + 3 + 2 - 1


def test_models_that_can_only_be_planned_have_phases_too() -> None:
    latent = LatentAttentionShape(4, kv_rank=32, rope_head_dim=8, nope_head_dim=16, value_head_dim=16)
    experts = ExpertsShape(4, 2, 16)
    block = dataclasses.replace(QWEN.blocks[0], mixer=latent, feed_forward=experts)
    shape = dataclasses.replace(QWEN, blocks=(block,) * 2, hidden_size=64)
    made = plan(shape, "answers: 3\nmax_seq_length: 128", gpu(80))
    generation = made.phases.of(RunPhase.GENERATION)
    assert generation is not None
    assert (generation.parts or {})[Part.CACHE] >= 3 * 256 * 2 * (32 + 8) * 2
    assert made.reserved is not None
    assert made.reserved.allocated <= made.reserved.reserved
