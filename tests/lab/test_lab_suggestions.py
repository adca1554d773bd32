"""The changes that would help most: by time if memory is free, by memory if it is tight."""

from __future__ import annotations

import pytest

from trimtab.lab.suggestions import Goal, Suggestion, suggest
from trimtab.run.target import PlanTarget, read_target


def suggested(target: PlanTarget) -> tuple[Suggestion, ...]:
    return suggest(target.plan, target.plan_for)


@pytest.fixture(scope="module")
def roomy() -> PlanTarget:
    return read_target("starter", ["recompute=block"], gpu="rtx4060ti-16gb", method="full")


def test_time_comes_first_if_memory_is_free(roomy: PlanTarget) -> None:
    found = suggested(roomy)
    assert len(found) == 3
    faster = [one for one in found if one.goal is Goal.TIME]
    assert found[: len(faster)] == tuple(faster)
    assert any("recompute: none" in one.lines or "recompute: auto" in one.lines for one in faster)
    assert all(one.seconds is not None and one.seconds < 0 for one in faster)
    same = [one.same_training for one in faster]
    assert same == sorted(same, reverse=True), "what trains the same comes first"


def test_memory_comes_first_if_it_is_tight_and_the_policy_is_fixed() -> None:
    full = read_target("Qwen/Qwen3-0.6B", ["recompute=none"], gpu="24GB", method="full")
    limit = f"{full.plan.memory.needed / 2**20 * 1.02:.0f}MiB"
    tight = read_target(
        "Qwen/Qwen3-0.6B", ["recompute=none", f"memory_limit={limit}"], gpu="rtx4090", method="full"
    )
    found = suggested(tight)
    assert all(one.saved > 0 and one.same_training for one in found)
    assert [one.saved for one in found] == sorted((one.saved for one in found), reverse=True)
    assert found[0].needed == tight.plan.memory.needed - found[0].saved


def test_without_rates_only_memory_is_predicted() -> None:
    found = suggested(read_target("Qwen/Qwen3-8B", gpu="24GB", method="qlora"))
    assert all(one.seconds is None and one.goal is Goal.MEMORY and one.saved > 0 for one in found)


def test_each_key_is_suggested_once(roomy: PlanTarget) -> None:
    found = suggest(roomy.plan, roomy.plan_for, count=20)
    keys = [one.lines[0].partition(":")[0] for one in found]
    assert len(keys) == len(set(keys))
    limit = min(roomy.plan.limit, roomy.device.available_bytes)
    assert all(one.needed <= limit for one in found)
    assert all("same_training" in one.to_dict() for one in found)


def test_the_batch_that_the_recipe_has_is_no_other_microbatch() -> None:
    """The fastest batch may be the recipe's own with other memory keys, which are separate suggestions."""
    own = ["recompute=block", "per_device_train_batch_size=16", "gradient_accumulation_steps=1"]
    target = read_target("starter", own, gpu="rtx4060ti-16gb", method="full")
    found = suggest(target.plan, target.plan_for, count=20)
    assert "recompute: none" in found[0].lines
    assert all(one.name != "another microbatch" for one in found)
