"""Searches: their answers fit, and slightly more does not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.facts.devices import DeviceFacts
from trimtab.facts.errors import RecipeError, ResourceError
from trimtab.facts.gpus import find_gpu
from trimtab.facts.shapes import uniform_shape
from trimtab.plan import (
    Plan,
    fits,
    make_plan,
    make_table,
    solve_batch_size,
    solve_cheapest,
    solve_fastest,
    solve_max_seq_length,
    solve_smallest_gpu,
)
from trimtab.plan import solve as solving
from trimtab.plan.checkpoints import background_bytes
from trimtab.plan.max_seq_length import STEP, largest_within
from trimtab.plan.solve import changed_recipe, check_question
from trimtab.recipe import Recipe, loads
from trimtab.run.resolve import resolve_recipe

SHAPE = uniform_shape("llama", 32_000, 1024, 2816, 6, num_heads=16, num_kv_heads=8, head_dim=64,
                      max_positions=1 << 20)  # fmt: skip
GPU = dataclasses.replace(find_gpu("rtx4090"), memory_bytes=4 * 10**9, host_free_bytes=16 * 2**30)
CPU = DeviceFacts("a CPU", "cpu", 16 * 2**30)
RECIPE = "model: q\ndata: {train: x}\noptim: adamw_8bit\n"


def planner(recipe: Recipe, device: DeviceFacts) -> Plan:
    return make_plan(recipe, SHAPE, resolve_recipe(recipe, SHAPE, device, 4), device=device)


def plan(keys: str = "", device: DeviceFacts = GPU) -> Plan:
    default = "" if "max_seq_length" in keys else "max_seq_length: 1024\n"
    return planner(loads(RECIPE + default + keys), device)


@given(st.integers(1, 10**7), st.integers(0, 10**4), st.integers(0, 10**9), st.integers(1, 10**6))
def test_the_largest_count_within_a_budget(base: int, slope: int, budget: int, maximum: int) -> None:
    def bytes_of(count: int) -> int:
        return base + slope * count + (slope * count * count) // 1000  # not linear, as with tiles

    count = largest_within(bytes_of, budget, maximum)
    assert 0 <= count <= maximum
    assert count == 0 or bytes_of(count) <= budget
    assert count == maximum or bytes_of(count + 1) > budget


def test_answers_set_memory_keys_to_auto() -> None:
    answer = solve_max_seq_length(plan("recompute: none\nmlp_tiles: 2\n"), planner)
    assert answer.keys["recompute"] == answer.keys["mlp_tiles"] == "auto", "the search chose them"
    assert f"max_seq_length: {answer.keys['max_seq_length']}" in answer.lines


PACKINGS = ("", "packing: false\n")
METHODS = {
    "full": "",
    "fp32": "dtype: fp32\n",
    "lora": "lora: {r: 8}\n",
    "qlora": "lora: {r: 8}\nload_in_4bit: true\n",
    "int8": "lora: {r: 8}\nload_in_8bit: true\n",
    "fused": "optim_in_backward: true\nmax_grad_norm: 0\ngradient_accumulation_steps: 1\n",
}
LIMITS = {"cuda": ("2500MB", "4GB"), "cpu": ("5GB", "7GB")}


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
@pytest.mark.parametrize("method", METHODS)
def test_the_longest_sequence_fits_and_a_longer_one_does_not(method: str, kind: str) -> None:
    device = GPU if kind == "cuda" else CPU
    answered = 0
    for limit, packing in zip(LIMITS[kind], PACKINGS, strict=True):
        keys = f"{METHODS[method]}{packing}memory_limit: {limit}\nper_device_train_batch_size: 1\n"
        original = plan(keys, device)
        answer = solve_max_seq_length(original, planner)
        tokens = answer.keys.get("max_seq_length", 0)
        assert tokens % STEP == 0
        answered += tokens > 0
        assert answer.plan is None or fits(answer.plan)
        for more in (1, 7):
            longer = changed_recipe(original.recipe, {"max_seq_length": tokens + more * STEP})
            assert not fits(planner(longer, device)), (limit, tokens, more)
    assert answered


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
@pytest.mark.parametrize("method", METHODS)
def test_the_largest_batch_fits_and_a_larger_one_does_not(method: str, kind: str) -> None:
    device = GPU if kind == "cuda" else CPU
    answered = 0
    for limit, packing in zip(LIMITS[kind], PACKINGS, strict=True):
        original = plan(f"{METHODS[method]}{packing}memory_limit: {limit}\nmax_seq_length: 384\n", device)
        answer = solve_batch_size(original, planner)
        assert all(fits(option.plan) for option in answer.options)
        largest = max((option.plan.job.batch for option in answer.options), default=0)
        answered += largest > 0
        total = original.job.batch * original.job.accumulation
        for batch in (largest + more for more in (1, 7)):
            accumulation = 1 if method == "fused" else -(-total // batch)
            keys = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
            assert not fits(planner(changed_recipe(original.recipe, keys), device)), (limit, batch)
    assert answered


def test_the_answer_names_what_leaves_slack() -> None:
    answer = solve_max_seq_length(plan("per_device_train_batch_size: 1\n"), planner)
    largest, safe = (option.plan for option in answer.options)
    assert f"{safe.job.tokens:,} tokens leave 3% of the memory" in answer.sentence
    assert safe.job.tokens < largest.job.tokens
    dynamic = GPU.memory_bytes - safe.memory.before.total - safe.memory.process_bytes
    assert safe.needed <= GPU.memory_bytes - 0.03 * dynamic < largest.needed
    batches = solve_batch_size(plan("max_seq_length: 384\n"), planner)
    assert "leave 3% of the memory" in batches.sentence


def test_accumulation_that_does_not_fit_is_not_proposed() -> None:
    """Accumulated gradients take memory that a single microbatch per step does not need."""
    keys = "max_seq_length: 32\nper_device_train_batch_size: 1\ngradient_accumulation_steps: 16\n"
    for limit in range(1900, 2400, 100):
        answer = solve_batch_size(plan(f"{keys}memory_limit: {limit}MB\n"), planner)
        assert answer.plan is None or fits(answer.plan), limit


def test_a_model_with_few_positions_bounds_the_length() -> None:
    short = dataclasses.replace(SHAPE, max_positions=2048)

    def of_short(recipe: Recipe, device: DeviceFacts) -> Plan:
        return make_plan(recipe, short, resolve_recipe(recipe, short, device, 4), device=device)

    answer = solve_max_seq_length(of_short(loads(RECIPE), GPU), of_short)
    assert answer.keys == {"max_seq_length": 2048}
    assert "the model has 2,048 positions" in answer.sentence


def test_the_largest_batch_keeps_the_global_batch() -> None:
    original = plan("per_device_train_batch_size: 4\ngradient_accumulation_steps: 6\n")
    answer = solve_batch_size(original, planner)
    assert answer.plan is not None
    batch, accumulation = (
        answer.keys[key] for key in ("per_device_train_batch_size", "gradient_accumulation_steps")
    )
    assert batch * accumulation == 24
    assert all(fits(option.plan) for option in answer.options)
    largest = max(option.plan.job.batch for option in answer.options)
    assert largest >= batch


@pytest.mark.parametrize("solve", [solve_max_seq_length, solve_batch_size])
def test_answers_on_a_cpu_leave_room_for_writing_checkpoints(solve: Any) -> None:
    answer = solve(plan("memory_limit: 4500MB\nrecompute: block\n", CPU), planner)
    assert answer.plan is not None
    assert background_bytes(answer.plan.job, answer.plan.disk) > 0
    assert all(fits(option.plan) for option in answer.options)


def test_more_tiles_are_tried_before_a_run_is_refused_for_its_checkpoints() -> None:
    keys = "memory_limit: 4500MB\ngradient_accumulation_steps: 1\nper_device_train_batch_size: "
    largest = solve_batch_size(plan(f"{keys}1\n", CPU), planner).options[-1].plan.job.batch
    assert largest == 22
    tiles = []
    for batch in range(1, largest + 1):
        found = plan(f"{keys}{batch}\n", CPU)
        assert fits(found), batch
        tiles.append(found.job.mlp_tiles)
        once = plan(f"{keys}{batch}\nsave_steps: null\n", CPU)
        assert tiles[-1] >= once.job.mlp_tiles
    assert tiles[0] == 1 < max(tiles)


@pytest.mark.parametrize("solve", [solve_max_seq_length, solve_batch_size])
def test_answers_fit_in_every_phase(solve: Any) -> None:
    keys = "recompute: block\noptim_in_backward: true\nmax_grad_norm: 0\ngradient_accumulation_steps: 1\n"
    for limit in ("2GB", "2500MB", "3GB"):
        answer = solve(plan(f"{keys}memory_limit: {limit}\n"), planner)
        assert answer.plan is not None
        assert fits(answer.plan), limit


def test_a_count_is_reduced_until_every_phase_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    original = plan()
    real = solving.fits
    monkeypatch.setattr(solving, "fits", lambda found: real(found) and found.job.tokens <= 1500)
    answer = solve_max_seq_length(original, planner)
    assert answer.keys["max_seq_length"] == 1280, "the largest multiple of 256 up to 1500"


def test_without_accumulation_the_batch_is_the_global_batch() -> None:
    keys = "optim_in_backward: true\nmax_grad_norm: 0\ngradient_accumulation_steps: 1\n"
    original = plan(f"{keys}per_device_train_batch_size: 6\n")
    answer = solve_fastest(original, planner)
    assert answer.keys["per_device_train_batch_size"] == 6
    assert [option.plan.job.accumulation for option in answer.options] == [1]
    small = dataclasses.replace(GPU, memory_bytes=2 * 10**9)
    fewer = solve_batch_size(plan(f"{keys}per_device_train_batch_size: 5000\n", small), planner)
    assert fewer.plan is not None
    assert fewer.plan.job.accumulation == 1
    assert f"the global batch becomes {fewer.plan.job.batch}" in fewer.sentence


def test_a_recipe_that_just_fits_is_not_called_too_large() -> None:
    keys = "max_seq_length: 2100\nper_device_train_batch_size: 8\n"
    fitting, missing = 4 * 10**9, 8 * 10**8
    while fitting - missing > 2**20:
        middle = (fitting + missing) // 2
        found = fits(plan(keys, dataclasses.replace(GPU, memory_bytes=middle)))
        fitting, missing = (middle, missing) if found else (fitting, middle)
    tight = dataclasses.replace(GPU, memory_bytes=fitting)
    answer = solve_max_seq_length(plan(keys, tight), planner)
    assert (answer.keys, answer.plan) == ({}, plan(keys, tight)), "2304 tokens do not fit, and 2048 are fewer"
    assert "the recipe's 2,100 tokens per sequence just fit" in answer.sentence
    assert "up to 8 sequences per microbatch fit" in solve_batch_size(plan(keys, tight), planner).sentence


def test_the_fastest_is_the_fastest_of_those_that_fit() -> None:
    original = plan()
    seen: list[str] = []
    answer = solve_fastest(original, planner, lambda what, done, total: seen.append(f"{done} of {total}"))
    rates = [option.tokens_per_second for option in answer.options]
    assert None not in rates
    assert rates == sorted(rates, key=lambda rate: -(rate or 0.0))
    assert answer.plan is answer.options[0].plan
    assert original.time.tokens_per_second is not None
    assert (rates[0] or 0.0) >= original.time.tokens_per_second
    assert len(seen) == 5, "microbatches of 1, 2, 4, 8 and 16"
    for option in answer.options:
        job = option.plan.job
        assert (job.batch * job.accumulation, fits(option.plan)) == (16, True)


def test_pasted_answers_give_the_same_plan() -> None:
    original = plan("recompute: block\nmlp_tiles: 4\n")
    for solve in (solve_fastest, solve_batch_size, solve_max_seq_length):
        answer = solve(original, planner)
        pasted = planner(changed_recipe(original.recipe, answer.keys), GPU)
        assert answer.plan is not None
        assert pasted.to_dict() == answer.plan.to_dict()
        assert solve(pasted, planner).keys.items() <= answer.keys.items(), "the memory keys are auto already"
    gpus = [find_gpu(name) for name in ("h200", "t4", "rtx4090")]
    for answer in (
        solve_smallest_gpu(original, planner, gpus),
        solve_cheapest(original, planner, [(gpu, 1.0, "mine") for gpu in gpus]),
    ):
        for option in answer.options:
            again = planner(original.recipe, find_gpu(option.name))
            assert again.to_dict() == option.plan.to_dict(), "as `--gpu NAME`"


def test_without_rates_there_is_no_fastest() -> None:
    unknown = dataclasses.replace(GPU, name="an unmeasured GPU", sheet=None)
    with pytest.raises(ResourceError, match="the speed of an unmeasured GPU is not known; measure it with"):
        solve_fastest(plan(device=unknown), planner)


def test_the_smallest_gpu_and_the_next_ones() -> None:
    gpus = [find_gpu(name) for name in ("h200", "t4", "rtx4090", "a100-80gb", "rtx3060-12gb")]
    answer = solve_smallest_gpu(plan(), planner, gpus)
    memories = [option.plan.device.memory_bytes for option in answer.options]
    assert memories == sorted(memories)
    assert answer.plan is not None
    assert answer.plan.device.name == find_gpu("rtx3060-12gb").name
    large = plan("per_device_train_batch_size: 4000\nrecompute: none\nmlp_tiles: 1\n", find_gpu("h200"))
    nothing = solve_smallest_gpu(large, planner, gpus)
    assert (nothing.plan, nothing.options) == (None, ())


def test_the_cheapest_by_price_and_speed() -> None:
    fast, slow = find_gpu("h200"), find_gpu("t4")
    answer = solve_cheapest(plan(), planner, [(slow, 1.0, "mine"), (fast, 1.0, "mine")])
    assert [option.name for option in answer.options] == ["h200", "t4"]
    best = answer.options[0]
    assert answer.sentence.endswith(" per million tokens at $1.00 per hour (price: mine)")
    priced = answer.to_dict()["options"][0]
    assert (priced["usd_per_hour"], priced["price_source"]) == (1.0, "mine")
    assert best.tokens_per_second is not None
    assert best.dollars_per_million_tokens == pytest.approx(1e6 / best.tokens_per_second / 3600)
    free_gpu = solve_cheapest(plan(), planner, [(slow, 0.0, "mine"), (fast, 1.0, "mine")])
    assert free_gpu.options[0].name == "t4"
    assert free_gpu.to_dict()["options"][0]["dollars_per_million_tokens"] == 0.0


def test_answers_if_nothing_fits() -> None:
    tiny = dataclasses.replace(GPU, memory_bytes=10**9)
    for solve in (solve_max_seq_length, solve_batch_size, solve_fastest):
        answer = solve(plan(device=tiny), planner)
        assert (answer.plan, answer.keys) == (None, {})
        assert "fit" in answer.sentence


def test_unknown_questions_are_refused() -> None:
    with pytest.raises(RecipeError, match="choose one of max_seq_length, batch_size"):
        check_question("longest")


def test_a_table_has_a_cell_for_each_combination() -> None:
    def cell(model: str, method: str, device: DeviceFacts) -> Plan:
        if model == "unknown":
            raise RecipeError("no such model", "give another")
        return plan("lora: {}\n" if method == "lora" else "", device)

    gpus = [("4GB", GPU), ("h200", find_gpu("h200"))]

    def longest(found: Plan) -> int:
        return round(found.device.memory_bytes / 1e6)

    cells = make_table(["tiny", "unknown"], gpus, ["full", "lora"], cell, longest=longest)
    assert [(c.model, c.method, c.gpu) for c in cells[:3]] == [
        ("tiny", "full", "4GB"), ("tiny", "full", "h200"), ("tiny", "lora", "4GB"),
    ]  # fmt: skip
    assert len(cells) == 8
    assert cells[0].longest == 4000
    assert cells[-1].longest is None, "there is no plan"
    assert (cells[-1].fits, cells[-1].problem) == (False, "no such model; give another")
    assert cells[-1].to_dict()["problem"]
