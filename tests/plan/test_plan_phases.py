"""Memory of the phases of a run, whether they fit, and the error for a phase that does not."""

from __future__ import annotations

import dataclasses
import json

import pytest
from plan_jobs import LLAMA_8B, QWEN

from trimtab.checkpoint import spec as checkpoint_spec
from trimtab.facts.blocks import ExpertsShape, LatentAttentionShape
from trimtab.facts.devices import DeviceFacts
from trimtab.facts.errors import ResourceError
from trimtab.facts.operations import MemoryPart
from trimtab.facts.phases import STEP_PHASES, RunPhase
from trimtab.facts.shapes import ModelShape
from trimtab.plan import Plan, check_fits, fits, make_plan
from trimtab.plan.checkpoints import background_bytes
from trimtab.plan.inference import cache_tokens
from trimtab.plan.memory import PROCESS_BYTES
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
    names = [phase.phase for phase in phases.phases]
    assert names == [phase for phase in PLANNED if phase is not RunPhase.MERGE]
    assert [phase.phase for phase in phases.during_run] == names[:-1]
    adapted = plan(LLAMA, QLORA, gpu(80)).phases
    assert {phase.phase for phase in adapted.phases} == {*PLANNED} - {RunPhase.EXPORT, RunPhase.GENERATION}
    assert adapted.of(RunPhase.GENERATION) is None


def test_step_phases_match_the_predicted_peak() -> None:
    result = plan(QWEN, "max_seq_length: 1024", gpu(80))
    step = [phase for phase in result.phases.phases if phase.phase in STEP_PHASES]
    assert max(phase.needed for phase in step) == result.memory.needed
    for phase in step:
        assert phase.buckets.total + PROCESS_BYTES["cuda"] == phase.needed
        if phase.phase is not RunPhase.OPTIMIZER_STEP:
            assert sum((phase.parts or {}).values()) == phase.buckets.activations


def test_no_gradients_and_little_memory_in_evaluation() -> None:
    phases = plan(QWEN, "max_seq_length: 1024\nper_device_train_batch_size: 8", gpu(80)).phases
    evaluation, backward = phases.of(RunPhase.EVALUATION), phases.of(RunPhase.BACKWARD)
    assert evaluation is not None
    assert backward is not None
    assert evaluation.buckets.gradients == 0
    assert evaluation.buckets.activations < backward.buckets.activations / 2


def test_generation_may_exceed_training() -> None:
    """64 answers of an 8B model in one batch: 2 GiB of keys and values."""
    result = plan(LLAMA, f"{QLORA}\nanswers: 100\nmemory_limit: 9GiB", gpu(80))
    generation = result.phases.of(RunPhase.GENERATION)
    assert generation is not None
    cache = 2 * 64 * cache_tokens(64, 128, 192) * 8 * 128 * 2 * 32
    assert cache == 2 * GIB
    assert generation.buckets.activations > cache
    assert result.phases.peak is generation
    assert result.memory.needed <= 9 * GIB < generation.needed
    with pytest.raises(ResourceError) as refused:
        check_fits(result)
    assert "generation of samples needs" in refused.value.cause
    assert "answers" in refused.value.remedy
    check_fits(plan(LLAMA, f"{QLORA}\nmemory_limit: 9GiB", gpu(80)))
    check_fits(plan(LLAMA, f"{QLORA}\nanswers: 100\nmemory_limit: 12GiB", gpu(80)))


def test_every_phase_that_can_be_refused_has_a_remedy() -> None:
    assert {*PHASE_REMEDIES} == {*PLANNED} - {*STEP_PHASES, *AFTERWARDS}


def test_host_memory_of_checkpoints_and_offloading() -> None:
    result = plan(LLAMA, QLORA, gpu(80))
    checkpoint, forward = result.phases.of(RunPhase.CHECKPOINT), result.phases.of(RunPhase.FORWARD)
    assert checkpoint is not None
    assert forward is not None
    largest = max(parameter.count for parameter in result.job.trained.parameters) * 4
    copy = checkpoint_spec.host_bytes(result.disk.checkpoint_bytes, largest)
    assert checkpoint.host - forward.host == copy
    assert forward.host > result.memory.host == 32 * 8192 * 4096 * 2
    assert result.phases.host == checkpoint.host


def test_on_a_cpu_host_and_device_are_the_same_memory() -> None:
    laptop = DeviceFacts("a laptop", "cpu", 64 * GIB)
    result = plan(QWEN, "max_seq_length: 256\nsave_steps: null", laptop)
    step = result.phases.of(RunPhase.BACKWARD)
    checkpoint = result.phases.of(RunPhase.CHECKPOINT)
    assert step is not None
    assert checkpoint is not None
    assert step.needed == step.host >= step.buckets.total + PROCESS_BYTES["cpu"]
    assert checkpoint.buckets == result.memory.before, "it is saved after the last step"
    frequent = plan(QWEN, "max_seq_length: 256\nsave_steps: 10", laptop).phases.of(RunPhase.CHECKPOINT)
    assert frequent is not None
    assert frequent.buckets == result.memory.peak, "a thread writes while training continues"


@pytest.mark.parametrize("steps", ["", "max_steps: 1000\n"])
def test_auto_leaves_room_for_writing_checkpoints_on_a_cpu(steps: str) -> None:
    laptop = DeviceFacts("a laptop", "cpu", 16 * GIB)
    keys = f"{steps}max_seq_length: 1024\noptim: adamw_8bit\nmlp_tiles: 1\n"
    limits = (13, 14.5, 16)
    written = [plan(QWEN, f"{keys}memory_limit: {gib}GiB", laptop) for gib in limits]
    alone = [plan(QWEN, f"{keys}memory_limit: {gib}GiB\nsave_steps: null", laptop) for gib in limits]
    for found, without in zip(written, alone, strict=True):
        assert background_bytes(without.job, without.disk) == 0 < background_bytes(found.job, found.disk)
        assert without.memory.needed + background_bytes(found.job, found.disk) > found.limit, "saves too much"
        assert fits(found), "more is recomputed instead of refusing the run"
        assert found.memory.needed < without.memory.needed


def test_tiles_do_not_depend_on_the_number_of_checkpoints() -> None:
    """Until the data is read, the number of checkpoints may be unknown; tiles determine how sums are rounded."""
    laptop = DeviceFacts("a laptop", "cpu", 24 * GIB)
    fitting = 0
    for gib in (8, 11, 13, 15, 18):
        keys = f"max_seq_length: 1024\noptim: adamw_8bit\nmemory_limit: {gib}GiB\n"
        unknown, once = plan(QWEN, keys, laptop), plan(QWEN, f"{keys}save_steps: null", laptop)
        assert unknown.disk.saving.saves is None
        if fits(plan(QWEN, f"{keys}mlp_tiles: {once.job.mlp_tiles}\n", laptop)):
            fitting += 1
            assert unknown.job.mlp_tiles == once.job.mlp_tiles
    assert fitting == 3


def test_plain_data() -> None:
    written = plan(LLAMA, QLORA, gpu(80)).phases.to_dict()
    assert json.loads(json.dumps(written)) == written
    places = [point["at"] for point in written["timeline"]]
    assert places == sorted(places)
    assert len(places) < 20, "the points of equal layers are on a line"
    assert places[-1] == 2 * 32 + 3 + 2 - 1


def test_models_without_training_support_have_phases_too() -> None:
    latent = LatentAttentionShape(4, kv_rank=32, rope_head_dim=8, nope_head_dim=16, value_head_dim=16)
    experts = ExpertsShape(4, 2, 16)
    block = dataclasses.replace(QWEN.blocks[0], mixer=latent, feed_forward=experts)
    shape = dataclasses.replace(QWEN, blocks=(block,) * 2, hidden_size=64)
    result = plan(shape, "answers: 3\nmax_seq_length: 128", gpu(80))
    generation = result.phases.of(RunPhase.GENERATION)
    assert generation is not None
    assert (generation.parts or {})[MemoryPart.CACHE] >= 3 * 256 * 2 * (32 + 8) * 2
    assert result.reserved is not None
    assert result.reserved.allocated <= result.reserved.reserved
