"""Savings and costs of each technique against planning the changed recipe."""

from __future__ import annotations

from typing import Any

import pytest

from trimtab.facts.devices import DeviceFacts
from trimtab.facts.gpus import find_gpu
from trimtab.facts.shapes import uniform_shape
from trimtab.plan import Plan, list_effects, make_plan
from trimtab.plan.changes import recipe_line, reversals, savings
from trimtab.plan.solve import changed_recipe
from trimtab.plan.what_if import Effect
from trimtab.recipe import loads
from trimtab.run.resolve import resolve_recipe

SHAPE = uniform_shape("qwen3", 151_936, 1024, 3072, 28, num_heads=16, num_kv_heads=8, head_dim=128,
                      tie_embeddings=True, qk_norm=True, max_positions=32_768)  # fmt: skip
GPU = find_gpu("h200")
UNKNOWN = DeviceFacts("an unmeasured GPU", "cuda", 80 * 10**9, capability=(8, 0), bf16=True)
BASE = "model: q\ndata: {train: x}\nmax_seq_length: 2048\nrecompute: none\nmlp_tiles: 1\ncuda_graphs: false\n"


def plan(keys: str = "", device: DeviceFacts = GPU) -> Plan:
    recipe = loads(BASE + keys)
    return make_plan(recipe, SHAPE, resolve_recipe(recipe, SHAPE, device, 4), device=device)


def replanned(original: Plan, keys: dict[str, Any]) -> Plan:
    recipe = changed_recipe(original.recipe, keys)
    return make_plan(recipe, SHAPE, resolve_recipe(recipe, SHAPE, original.device, 4), device=original.device)


def by_name(effects: list[Effect]) -> dict[str, Effect]:
    return {effect.change.name: effect for effect in effects}


@pytest.mark.parametrize("more", ["", "lora: {r: 16}\ndequantized_layers: 0\n"])
def test_bytes_and_seconds_match_the_changed_recipe(more: str) -> None:
    original = plan(more)
    tokens = original.job.batch * original.job.tokens * original.job.accumulation
    checked = 0
    for effect in list_effects(original):
        if not effect.change.keys or effect.change.in_use or effect.change.name in ("LoRA", "QLoRA"):
            continue
        changed = replanned(original, effect.change.keys)
        assert effect.needed == changed.memory.needed, effect.change.text
        assert effect.saved == original.memory.needed - changed.memory.needed
        assert changed.time.tokens_per_second is not None
        assert original.time.step_seconds is not None
        seconds = tokens / changed.time.tokens_per_second - original.time.step_seconds
        assert effect.seconds == pytest.approx(seconds, abs=1e-9), effect.change.text
        checked += 1
    assert checked >= 7


def test_documented_techniques_are_listed() -> None:
    full, lora = by_name(list_effects(plan())), by_name(list_effects(plan("lora: {r: 16}\n")))
    assert {
        "8-bit optimizer states", "activation checkpointing", "activation offloading", "bf16 gradients",
        "checkpointing half the layers", "smaller microbatch", "feed-forward in tiles", "LoRA", "QLoRA",
        "optimizer in backward", "loss in smaller chunks",
    } <= full.keys()  # fmt: skip
    assert {"NF4 weights", "INT8 weights"} <= lora.keys()
    assert "shorter sequences" not in full


def test_the_cheapest_comes_first_and_techniques_in_use_last() -> None:
    effects = list_effects(plan("optim: adamw_8bit\nlora: {r: 16}\n"))
    useful = [effect for effect in effects if not effect.change.in_use]
    assert effects[: len(useful)] == useful
    assert [effect.price for effect in useful] == sorted(effect.price for effect in useful)
    used = by_name([effect for effect in effects if effect.change.in_use])
    assert {"8-bit optimizer states", "LoRA", "gradient accumulation"} <= used.keys()
    assert used["LoRA"].saved < 0, "turning it off takes more memory"
    assert used["LoRA"].change.keys == {"lora": None}


def test_recomputing_costs_time_and_a_policy_in_use_can_be_turned_off() -> None:
    block = next(effect for effect in list_effects(plan()) if effect.change.keys == {"recompute": "block"})
    assert block.saved > 2**30
    assert block.seconds is not None
    assert block.seconds > 0
    recomputed = plan().recipe.model_copy(update={"recompute": "block"})
    with_block = make_plan(recomputed, SHAPE, resolve_recipe(recomputed, SHAPE, GPU, 4), device=GPU)
    off = by_name(list_effects(with_block))["activation checkpointing"]
    assert off.change.in_use
    assert off.saved == -block.saved
    assert off.seconds == pytest.approx(-block.seconds)


def test_without_known_rates_there_are_no_times() -> None:
    effects = list_effects(plan(device=UNKNOWN))
    assert effects
    assert all(effect.seconds is None for effect in effects)
    written = effects[0].to_dict()
    assert (written["seconds"], written["in_use"]) == (None, False)


def test_no_change_contradicts_the_recipe() -> None:
    """Every change produces a valid recipe, for any recipe."""
    variants = (
        "", "lora: {}\nload_in_4bit: true\n", "lora: {}\nload_in_8bit: true\n", "packing: false\n",
        "packing: false\ngroup_by_length: true\n", "optim: adamw_8bit\ngradient_dtype: bf16\n",
        "optim_in_backward: true\nmax_grad_norm: 0\ngradient_accumulation_steps: 1\n",
        "dtype: fp32\n", "dtype: fp16\n", "per_device_train_batch_size: 3\n",
    )  # fmt: skip
    for keys in variants:
        original = plan(keys)
        for change in (*savings(original, original.job), *reversals(original)):
            changed_recipe(original.recipe, change.keys)


def test_recipe_lines() -> None:
    assert recipe_line("recompute", {"block": 2, "none": 3}) == "recompute: {block: 2, none: 3}"
    assert recipe_line("save_steps", None) == "save_steps: null"
