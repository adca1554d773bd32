"""CUDA graphs are planned only with settings whose reserved memory fits, and only if an eager step is not faster."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
from plan_jobs import QWEN

from trimtab.facts.calibration import Calibration
from trimtab.facts.devices import DeviceFacts
from trimtab.facts.errors import ResourceError
from trimtab.facts.shapes import ModelShape, uniform_shape
from trimtab.plan import Plan, check_fits, fits, make_plan
from trimtab.plan import graphs as plan_graphs
from trimtab.plan import make as plan_make
from trimtab.plan.detail import detailed_dict
from trimtab.plan.job import Job
from trimtab.plan.memory import BYTES_OUTSIDE_ALLOCATOR, predict
from trimtab.plan.memory_search import MemorySetting, search_rates
from trimtab.plan.reserved import Reserved
from trimtab.plan.resolved import MemoryPlan
from trimtab.plan.step_time import step_time, step_time_at
from trimtab.plan.what_if import effects, list_effects
from trimtab.recipe import loads
from trimtab.report.plan_panel import verdict
from trimtab.run.resolve import resolve_graphs, resolve_memory_on_resume, resolve_recipe

GPU = DeviceFacts(
    "NVIDIA H200", "cuda", 150_109_880_320, free_bytes=149 * 10**9, capability=(9, 0), bf16=True,
    cores=16, host_free_bytes=120 * 2**30,
)  # fmt: skip
LLAMA_8B = uniform_shape("llama", 128_256, 4096, 14_336, 32, num_heads=32, num_kv_heads=8, head_dim=128,
                     max_positions=131_072)  # fmt: skip
FULL = """model: q
data: {train: x}
optim: adamw_8bit
packing: false
max_seq_length: 2048
per_device_train_batch_size: 4
gradient_accumulation_steps: 1
"""
QLORA = """model: q
data: {train: x}
optim: adamw_8bit
packing: false
max_seq_length: 8192
per_device_train_batch_size: 1
gradient_accumulation_steps: 1
lora: {r: 16}
load_in_4bit: true
"""


@pytest.fixture
def fragmented(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes every capture reserve these bytes more than the peak of its tensors, whatever the simulation says."""

    def reserve_more(nbytes: int) -> None:
        def reserved_memory(job: Job, *, graphs: bool = False, **_: Any) -> Reserved:
            context = BYTES_OUTSIDE_ALLOCATOR[job.device]
            allocated = predict(job).needed - context
            return Reserved(allocated, allocated + nbytes if graphs else allocated, context)

        for module in (plan_graphs, plan_make):
            monkeypatch.setattr(module, "reserved_memory", reserved_memory)

    return reserve_more


def plan(*overrides: str, recipe: str = FULL, shape: ModelShape = QWEN, device: DeviceFacts = GPU) -> Plan:
    loaded = loads(recipe, overrides)
    return make_plan(loaded, shape, resolve_recipe(loaded, shape, device, threads=4), device=device)


def qlora(*overrides: str) -> Plan:
    return plan(*overrides, recipe=QLORA, shape=LLAMA_8B)


def eager_plan(*overrides: str, **options: Any) -> Plan:
    return plan(*overrides, "cuda_graphs=false", **options)


def cap(found: Plan) -> int:
    """Bytes that the allocator may reserve."""
    return found.limit - BYTES_OUTSIDE_ALLOCATOR["cuda"]


def spare(found: Plan) -> int:
    """Bytes that the tensors of a step leave free: with as many more, a capture just fits."""
    return found.limit - found.memory.needed


def reserved_with_graphs(found: Plan) -> int:
    simulated = plan_graphs.reserved_memory(found.job, graphs=True, limit=cap(found))
    return max(simulated.reserved, simulated.claimed)


def margin(found: Plan) -> int:
    """Bytes that a setting which was searched for graphs leaves free."""
    return int(plan_graphs.SEARCH_MARGIN * found.limit)


def step_seconds(found: Plan) -> float:
    rates = search_rates(found.device, "bf16")
    return step_time_at(found.job, rates, graphs=found.resolved.graphs.enabled).seconds


@pytest.mark.parametrize("limit", ["7GiB", "8.8GiB"])
def test_a_setting_with_which_graphs_fit_is_preferred_to_slow_eager_steps(
    fragmented: Callable[[int], None], limit: str
) -> None:
    first = eager_plan(f"memory_limit={limit}")
    fragmented(spare(first) + 2**28)
    chosen = plan(f"memory_limit={limit}")
    assert reserved_with_graphs(first) > cap(first)
    assert chosen.resolved.graphs.enabled
    assert chosen.reserved is not None
    assert chosen.reserved.reserved <= cap(chosen)
    assert chosen.memory.needed < first.memory.needed
    assert step_seconds(chosen) < 0.9 * step_seconds(first), "launches take longer than the kernels"
    assert f"memory_limit: {limit} with CUDA graphs" in chosen.resolved.memory_plan.reason
    assert fits(chosen)
    check_fits(chosen)


def test_free_memory_is_a_limit_too(fragmented: Callable[[int], None]) -> None:
    fragmented(spare(eager_plan("memory_limit=7GiB")) + 2**28)
    free = dataclasses.replace(GPU, free_bytes=7 * 2**30)
    chosen, limited = plan(device=free), plan("memory_limit=7GiB")
    assert chosen.resolved.memory_plan.recompute == limited.resolved.memory_plan.recompute
    assert chosen.resolved.graphs.enabled
    assert "the 7.00 GiB of free memory with CUDA graphs" in chosen.resolved.memory_plan.reason


@pytest.mark.parametrize("more", [None, 2**28])
@pytest.mark.parametrize("size", [x / 10 for x in range(56, 160, 8)])
def test_every_planned_graph_fits_and_is_no_slower_than_eager(
    fragmented: Callable[[int], None], size: float, more: int | None
) -> None:
    """With the simulated memory, and with captures that reserve 256 MiB more than their tensors."""
    if more is not None:
        fragmented(more)
    limit = f"memory_limit={size}GiB"
    first, chosen = eager_plan(limit), plan(limit)
    if reserved_with_graphs(first) <= cap(first) or not fits(first):
        assert chosen.resolved.memory == first.resolved.memory
        assert chosen.resolved.graphs.enabled
    elif chosen.resolved.graphs.enabled:
        assert reserved_with_graphs(chosen) <= cap(chosen) - margin(chosen)
        assert step_seconds(chosen) <= step_seconds(first)
    else:
        assert chosen.resolved.memory == first.resolved.memory
        assert "would not fit" in chosen.resolved.graphs.reason


def test_graphs_are_off_if_no_setting_with_them_fits(fragmented: Callable[[int], None]) -> None:
    fragmented(2**29)
    chosen, eager = plan("memory_limit=6.35GiB"), eager_plan("memory_limit=6.35GiB")
    assert chosen.resolved.graphs.enabled is False
    assert chosen.resolved.graphs.reason.startswith("CUDA graphs would not fit memory_limit: 6.35GiB: ")
    assert "slower" not in chosen.resolved.graphs.reason
    assert f"steps run eagerly: {chosen.resolved.graphs.reason}" in chosen.notes
    assert not any("eagerly" in note for note in eager.notes)
    assert chosen.resolved.memory == eager.resolved.memory
    assert chosen.time.step_seconds == eager.time.step_seconds
    check_fits(chosen)


def test_graphs_are_off_if_settings_with_them_are_slower(fragmented: Callable[[int], None]) -> None:
    fragmented(2**29)
    chosen, forced = qlora("memory_limit=8.5GiB"), qlora("memory_limit=8.5GiB", "cuda_graphs=true")
    assert chosen.resolved.graphs.enabled is False
    assert chosen.resolved.graphs.reason.endswith("; settings with which they fit are slower")
    assert chosen.resolved.memory == qlora("memory_limit=8.5GiB", "cuda_graphs=false").resolved.memory
    assert forced.resolved.graphs.enabled
    assert reserved_with_graphs(forced) <= cap(forced) - margin(forced)
    assert step_seconds(forced) > step_seconds(chosen)
    check_fits(forced)


def test_required_graphs_that_do_not_fit_are_refused(fragmented: Callable[[int], None]) -> None:
    fragmented(2**29)
    required = plan("memory_limit=6.35GiB", "cuda_graphs=true")
    assert required.memory.needed <= required.limit
    assert not fits(required)
    with pytest.raises(ResourceError) as caught:
        check_fits(required)
    assert re.search(r"with cuda_graphs: true needs \d\.\d\d GiB", caught.value.cause)
    assert "memory_limit: 6.35GiB allows 6.35 GiB" in caught.value.cause
    assert caught.value.remedy == "set cuda_graphs: auto"
    assert re.fullmatch(
        r"Does not fit: cuda_graphs: true needs \d\.\d\d GiB, but memory_limit allows 6\.35 GiB\.",
        verdict(detailed_dict(required)),
    )
    check_fits(plan("memory_limit=6.35GiB", "cuda_graphs=auto"))


def without_reason(memory: MemoryPlan) -> MemoryPlan:
    return dataclasses.replace(memory, reason="")


@pytest.mark.parametrize("graphs", ["auto", "true"])
def test_policies_set_in_the_recipe_are_kept(fragmented: Callable[[int], None], graphs: str) -> None:
    """Then tiles and the loss's memory are those of an eager step too: only graphs are decided."""
    keys = ("memory_limit=7GiB", "recompute={selective: 22, pointwise: 5, none: 1}")
    first = eager_plan(*keys)
    fragmented(spare(first) + 1)
    chosen = plan(*keys, f"cuda_graphs={graphs}")
    assert reserved_with_graphs(first) > cap(first)
    assert chosen.resolved.memory == first.resolved.memory
    assert chosen.resolved.graphs.enabled is (graphs == "true")
    assert fits(chosen) is (graphs == "auto")


@pytest.mark.parametrize("recompute", ["none", "auto"])
def test_fewer_dequantized_copies_make_room(fragmented: Callable[[int], None], recompute: str) -> None:
    """Copies fill the remaining memory, also with policies that are set in the recipe."""
    keys = ("max_seq_length=2048", "memory_limit=20.5GiB", f"recompute={recompute}")
    fragmented(0)
    before = qlora(*keys)
    assert before.resolved.graphs.enabled
    fragmented(spare(before) + 300 * 2**20)
    after = qlora(*keys)
    copies = after.resolved.memory_plan.dequantized_layers
    assert 0 < copies < before.resolved.memory_plan.dequantized_layers
    assert set(after.resolved.memory_plan.recompute) == {"none"}
    assert after.resolved.graphs.enabled
    assert reserved_with_graphs(after) <= cap(after) - margin(after)


def test_a_calibration_does_not_change_the_choice(fragmented: Callable[[int], None]) -> None:
    """Tiles and loss memory determine the rounding of sums. At these rates no launch would take any time."""
    calibrated = dataclasses.replace(GPU, calibration=Calibration("slow", {"bf16": 1e12}, 1e11, 0.0))
    first = eager_plan("memory_limit=7GiB")
    fragmented(spare(first) + 2**28)
    plain = plan("memory_limit=7GiB")
    seconds = [
        step_time(found.job, calibrated, graphs=found.resolved.graphs.enabled) for found in (first, plain)
    ]
    assert seconds[0] is not None
    assert seconds[1] is not None
    assert seconds[0].seconds < seconds[1].seconds, "the calibrated rates would choose the other"
    chosen = plan("memory_limit=7GiB", device=calibrated)
    assert chosen.resolved.graphs.enabled
    assert without_reason(chosen.resolved.memory_plan) == without_reason(plain.resolved.memory_plan)


def test_nothing_is_simulated_far_below_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_graphs, "reserved_memory", None)
    assert plan().resolved.graphs.enabled
    with pytest.raises(TypeError):
        plan("memory_limit=7GiB")


def test_the_number_of_simulations_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    first, simulated = eager_plan("memory_limit=8GiB"), []

    def reserve_too_much(job: Job, **_: Any) -> Reserved:
        simulated.append(job)
        return Reserved(0, cap(first) + 1, 0)

    monkeypatch.setattr(plan_graphs, "reserved_memory", reserve_too_much)
    assert plan("memory_limit=8GiB").resolved.graphs.enabled is False
    assert len(simulated) == 1 + plan_graphs.MAX_SEARCHES
    assert len({job.policies for job in simulated}) == len(simulated)


def memory_of(job: Job) -> tuple[Any, ...]:
    return job.policies, job.mlp_tiles, job.loss_memory


@pytest.mark.parametrize(
    ("first_free", "others_free", "enabled", "other"),
    [(0, 0, True, False), (-1, 0, True, True), (-1, -1, False, False)],
    ids=["first without margin", "margin", "less than the margin"],
)
def test_only_another_setting_leaves_a_margin(
    monkeypatch: pytest.MonkeyPatch, first_free: int, others_free: int, enabled: bool, other: bool
) -> None:
    """The simulation is not exact: bytes that captures leave free of the limit, those of other settings less 0.5 %."""
    first = eager_plan("memory_limit=8GiB")

    def reserved_memory(job: Job, **_: Any) -> Reserved:
        same = memory_of(job) == memory_of(first.job)
        free = first_free if same else others_free + 8 * 2**30 // 200
        return Reserved(0, cap(first) - free, 0)

    monkeypatch.setattr(plan_graphs, "reserved_memory", reserved_memory)
    chosen = plan("memory_limit=8GiB")
    assert chosen.resolved.graphs.enabled is enabled
    assert (memory_of(chosen.job) != memory_of(first.job)) is other


@pytest.mark.parametrize(("needed", "found"), [(995, True), (996, False)])
def test_a_setting_whose_tensors_leave_no_margin_is_not_chosen(needed: int, found: bool) -> None:
    """`graphs_shortfall` is 0 if not even an eager step fits, here one that leaves the margin free."""
    first, lowest = (MemorySetting((), 1, None, nbytes, 0, 0.0) for nbytes in (999, needed))
    result = plan_graphs.find_setting_for_graphs(first, 1, 1000, lambda _: (lowest, True), lambda *_: 0)
    assert (result is not None) is found


@pytest.mark.parametrize(
    ("limit", "enabled", "other"),
    [("6.35GiB", False, False), ("7GiB", True, True), ("20GiB", True, False)],
    ids=["eager", "other setting", "same setting"],
)
def test_a_resumed_run_decides_as_its_first_start(
    fragmented: Callable[[int], None], limit: str, enabled: bool, other: bool
) -> None:
    eager = eager_plan(f"memory_limit={limit}")
    fragmented(spare(eager_plan("memory_limit=7GiB")) + 2**28)
    first = plan(f"memory_limit={limit}")
    assert first.resolved.graphs.enabled is enabled
    assert (first.resolved.memory != eager.resolved.memory) is other
    again = resolve_graphs(first.recipe, QWEN, GPU, first.resolved)
    assert again == first.resolved
    changed = resolve_memory_on_resume(first.recipe, QWEN, GPU, first.resolved)
    assert changed.graphs.enabled == first.resolved.graphs.enabled


def test_a_memory_plan_with_which_graphs_do_not_fit_is_resumed_without_them(
    fragmented: Callable[[int], None],
) -> None:
    """A run that was started by an earlier version, or with more free memory."""
    first = eager_plan("memory_limit=7GiB")
    fragmented(spare(first) + 1)
    recipe = loads(FULL, ["memory_limit=7GiB"])
    resolved = resolve_graphs(recipe, QWEN, GPU, first.resolved)
    assert resolved.memory == first.resolved.memory
    assert resolved.graphs.enabled is False
    assert "CUDA graphs would not fit memory_limit: 7GiB" in resolved.graphs.reason
    raised = loads(FULL, ["memory_limit=9GiB"])
    kept = resolve_graphs(raised, QWEN, GPU, first.resolved)
    assert kept.graphs.enabled is False, "the allocator's limit is that of the stored plan"


def test_what_if_counts_changes_that_make_room_for_graphs(fragmented: Callable[[int], None]) -> None:
    keys = ("memory_limit=7GiB", "recompute={selective: 22, pointwise: 5, none: 1}")
    fragmented(spare(eager_plan(*keys)) + 1)
    chosen = plan(*keys)
    assert chosen.resolved.graphs.enabled is False
    block = next(e for e in list_effects(chosen) if e.change.keys.get("recompute") == "block")
    with_graphs = plan("memory_limit=7GiB", "recompute=block")
    assert with_graphs.resolved.graphs.enabled
    assert block.seconds is not None
    assert chosen.time.step_seconds is not None
    assert with_graphs.time.step_seconds == pytest.approx(chosen.time.step_seconds + block.seconds, rel=0.02)
    assert block.seconds < 0
    always_eager = eager_plan(*keys)
    (same,) = effects(always_eager, [block.change])
    assert same.seconds is not None
    assert same.seconds > block.seconds


def test_a_run_that_does_not_fit_is_judged_as_with_enough_memory() -> None:
    refused = plan("memory_limit=7GiB", "recompute=none")
    assert not fits(refused)
    assert refused.resolved.graphs.enabled
    with pytest.raises(
        ResourceError, match=r"recompute: selective \(saves .*, costs \d+(\.\d+)? ms per step\)"
    ):
        check_fits(refused)
