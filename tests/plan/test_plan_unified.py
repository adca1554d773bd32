"""Unified memory: nothing is offloaded if host and device share memory."""

from __future__ import annotations

import dataclasses

import pytest

from trimtab.adapt.spec_recompute import OFFLOADING
from trimtab.facts.devices import DeviceFacts
from trimtab.facts.errors import ResourceError
from trimtab.facts.gpus import find_gpu
from trimtab.facts.shapes import uniform_shape
from trimtab.plan import Plan, check_fits, make_plan
from trimtab.plan.changes import savings
from trimtab.recipe import loads
from trimtab.run.resolve import resolve_recipe

SHAPE = uniform_shape(
    "llama", 32_000, 2048, 5632, 22, num_heads=32, num_kv_heads=4, head_dim=64, max_positions=32_768
)
RECIPE = "model: q\ndata: {train: x}\nlora: {r: 8}\nmax_seq_length: 8192\nper_device_train_batch_size: 4\n"
CARD = DeviceFacts(
    "NVIDIA H200", "cuda", 150 * 10**9, capability=(9, 0), bf16=True, host_free_bytes=200 * 2**30
)
UNIFIED = dataclasses.replace(CARD, unified=True, host_free_bytes=None)


def planned(device: DeviceFacts, gigabytes: float, *overrides: str) -> Plan:
    here = dataclasses.replace(device, memory_bytes=int(gigabytes * 10**9))
    recipe = loads(RECIPE, list(overrides))
    return make_plan(recipe, SHAPE, resolve_recipe(recipe, SHAPE, here, threads=4), device=here)


def tight(device: DeviceFacts) -> float:
    """A memory size in GB at which the card offloads."""
    for gigabytes in (16, 14, 12, 10, 8, 7, 6, 5):
        if set(planned(device, gigabytes).job.layer_policies) & set(OFFLOADING):
            return gigabytes
    raise AssertionError("no size makes the planner offload")


def test_the_search_offloads_on_a_card_and_not_with_unified_memory() -> None:
    gigabytes = tight(CARD)
    assert not set(planned(UNIFIED, gigabytes).job.layer_policies) & set(OFFLOADING)
    assert planned(UNIFIED, gigabytes).memory.host == 0


def test_a_policy_that_offloads_is_refused_with_unified_memory() -> None:
    check_fits(planned(CARD, 100, "recompute=offload"))
    with pytest.raises(
        ResourceError, match="offload gains nothing on NVIDIA H200, whose GPU and CPU share one"
    ):
        check_fits(planned(UNIFIED, 100, "recompute=offload"))
    check_fits(planned(UNIFIED, 100, "recompute=auto"))


def test_offloading_is_not_advised_with_unified_memory() -> None:
    def advice(device: DeviceFacts) -> str:
        with pytest.raises(ResourceError) as refused:
            check_fits(planned(device, 9, "recompute=none", "mlp_tiles=1"))
        return str(refused.value)

    plans = [planned(device, 9, "recompute=none", "mlp_tiles=1") for device in (CARD, UNIFIED)]
    names = [{change.text for change in savings(plan, plan.job)} for plan in plans]
    assert "recompute: offload" in names[0]
    assert "recompute: offload" not in names[1]
    assert "recompute: offload" not in advice(UNIFIED)


def test_notes_list_assumptions_and_other_processes_on_the_device() -> None:
    notes = planned(find_gpu("gb10"), 100).notes
    assert any("share one memory" in note for note in notes)
    assert any("less 4 GiB for the operating system" in note for note in notes)
    assert any("does not train on AMD GPUs" in note for note in planned(find_gpu("mi300x"), 100).notes)
    shared = dataclasses.replace(CARD, shared="3.1 GiB of this GPU are used by 2 other processes")
    assert shared.shared in planned(shared, 100).notes
    assert not any("memory" in note for note in planned(CARD, 100).notes)
