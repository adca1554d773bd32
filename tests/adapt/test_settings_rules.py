"""A recipe's `lora` and `LoraSettings` accept the same values, including edge cases."""

from __future__ import annotations

from typing import Any

import pytest

from trimtab.adapt import LoraSettings, settings_rules
from trimtab.facts.errors import RecipeError
from trimtab.recipe import build

EDGES: dict[str, list[Any]] = {
    "r": [0, 1, -1, 2**31 - 1, 2**31, 1.5, True, "8", None],
    "lora_alpha": [0, 1e-9, -1, 1, float("inf"), float("nan"), True, "8", None],
    "lora_dropout": [0, 0.5, 1, -0.1, 0.999, float("nan"), True, "a"],
    "use_rslora": [True, False, 1, "true"],
    "use_dora": [True, False, 0, "false"],
    "target_modules": ["all-linear", "", [], ["q_proj"], [1], 5],
    "modules_to_save": [[], ["lm_head"], "lm_head", [1]],
    "rank_pattern": [
        {},
        {"q_proj": 1},
        {"q_proj": 0},
        {"q_proj": 2**31},
        {"q_proj": 1.5},
        ["q_proj"],
        {"q_proj": True},
    ],
    "alpha_pattern": [
        {},
        {"q_proj": 1},
        {"q_proj": 0},
        {"q_proj": -1},
        {"q_proj": float("inf")},
        {"q_proj": None},
    ],
    "dtype": ["fp32", "bf16", "fp16", 16],
}


def taken(make: Any) -> bool:
    try:
        make()
    except RecipeError:
        return False
    return True


@pytest.mark.parametrize(("key", "value"), [(key, value) for key in EDGES for value in EDGES[key]], ids=str)
def test_a_recipe_accepts_what_the_settings_accept(key: str, value: Any) -> None:
    recipe = {"model": "a", "data": {"train": "x"}, "lora": {key: value}}
    assert taken(lambda: build(recipe)) == taken(lambda: LoraSettings(**{"r": 4, key: value}))


def test_every_rule_has_edge_cases() -> None:
    assert set(EDGES) >= set(settings_rules._RULES) - {"any_rank"}
