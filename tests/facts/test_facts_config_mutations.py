"""Damaged config.json files: each gives a shape or a ModelError, never another exception."""

from __future__ import annotations

import copy
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from test_facts_shapes_hf import LLAMA32_1B, QWEN3_06B

from trimtab.facts.errors import ModelError
from trimtab.facts.gpus import find_gpu
from trimtab.model.catalogue import catalogue_entries
from trimtab.model.families import config_from_shape, shape_for_planning, shape_from_config
from trimtab.model.families.config_json import read_config
from trimtab.recipe import loads
from trimtab.run.target import plan_shape

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "beta_fast": 32,
    "beta_slow": 1,
}
BASES: list[dict[str, Any]] = [
    QWEN3_06B,
    LLAMA32_1B,
    {**QWEN3_06B, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 32},
    {**LLAMA32_1B, "model_type": "mistral", "sliding_window": 64},
    {**LLAMA32_1B, "rope_scaling": YARN},
    {**QWEN3_06B, "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
]
KEYS = [
    "model_type",
    "rope_scaling",
    "rope_parameters",
    "quantization_config",
    "hidden_act",
    "partial_rotary_factor",
    "layer_types",
    "head_dim",
    "original_max_position_embeddings",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "num_key_value_heads",
    "mlp_bias",
]
INNER = [
    "rope_type",
    "type",
    "factor",
    "original_max_position_embeddings",
    "low_freq_factor",
    "high_freq_factor",
    "mscale",
    "mscale_all_dim",
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "truncate",
    "rope_theta",
    "load_in_4bit",
    "bnb_4bit_quant_type",
    "quant_method",
]
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 7, 64, 3.5, -20.0, 1e-320, 1e308, -0.0, 10**400, 2**63, 2**40, "", "abc", "1",
    "silu", "bitsandbytes", "yarn", "llama3", "dynamic", "linear", [], [1], ["full_attention"], {}, {"a": 1}, math.nan,
    math.inf, [[]], YARN, {"quant_method": "bitsandbytes"}, {"quant_method": ["x"]},
]  # fmt: skip


def mutated(rng: random.Random) -> dict[str, Any]:
    """One of the configs with up to four keys, at the top or one level down, removed or given another value."""
    config = copy.deepcopy(rng.choice(BASES))
    for _ in range(rng.randint(1, 4)):
        inner = [value for value in config.values() if isinstance(value, dict)]
        place, names = config, [*config, *KEYS]
        if inner and rng.random() < 0.5:
            place = rng.choice(inner)
            names = [*place, *INNER]
        if rng.random() < 0.15:
            place.pop(rng.choice(names), None)
        else:
            place[rng.choice(names)] = copy.deepcopy(rng.choice(VALUES))
    return config


@pytest.mark.parametrize("seed", range(4))
def test_a_mutated_config_gives_a_shape_or_a_model_error(seed: int) -> None:
    rng, shapes, refused = random.Random(seed), 0, 0
    for _ in range(400):
        config = mutated(rng)
        try:
            shape = shape_from_config(config)
            config_from_shape(shape, dtype="bfloat16")
            shapes += 1
        except ModelError:
            refused += 1
    assert shapes > 20, "the mutations leave some configs whole"
    assert refused > 20


DESCRIBED = {entry.config["model_type"]: dict(entry.config) for entry in catalogue_entries()}


@pytest.mark.parametrize("family", DESCRIBED)
def test_a_described_model_with_one_damaged_value_is_planned_or_refused(family: str) -> None:
    recipe = loads("model: a\ndata: {train: x}\nrecompute: block\nmlp_tiles: 1\nlora: {r: 1}\n")
    refused, shapes = 0, set()
    for key in DESCRIBED[family]:
        for value in (0, -1, 1, "x", None, []):
            config = {**DESCRIBED[family], "num_hidden_layers": 4, key: value}
            try:
                shapes.add(shape_for_planning(config, "config.json"))
            except ModelError:
                refused += 1
    assert refused > 40
    for shape in shapes:
        plan = plan_shape(recipe, shape, find_gpu("rtx4090"))
        assert plan.memory.peak.weights > 0
        json.dumps(plan.to_dict(), allow_nan=False)


@pytest.mark.parametrize("kind", [["llama"], {"a": 1}, 5, None, True])
def test_a_model_type_that_is_not_a_string_raises(kind: Any) -> None:
    with pytest.raises(ModelError, match="which trimtab does not support"):
        shape_from_config({**QWEN3_06B, "model_type": kind})


@pytest.mark.parametrize(
    "text", ["1" * 5000, '{"a": ' + "9" * 5000 + "}", "[" * 100_000, "\x00", "[]", '"a"']
)
def test_a_config_that_is_not_a_json_object_raises(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError):
        read_config(tmp_path)


def test_mutated_values_can_be_written_as_json() -> None:
    """So that mutated configs can be written to a file."""
    assert all(json.dumps(value) for value in VALUES)
