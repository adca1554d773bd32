"""Overrides: `key=value` on the command line, on top of a recipe file."""

from __future__ import annotations

import pytest

from trimtab.facts.errors import RecipeError
from trimtab.recipe import dump, loads

MINIMAL = "model: starter\ndata:\n  train: [notes.txt]\n"


def message(text: str, overrides: tuple[str, ...] = ()) -> str:
    with pytest.raises(RecipeError) as caught:
        loads(text, overrides)
    return str(caught.value)


def test_overrides() -> None:
    recipe = loads(
        MINIMAL,
        [
            "learning_rate=1e-4",
            "data.train.0.weight=2",
            "model.revision=123",
            "data.replay.sources=[a, {source: b, first: 3}]",
            "prompts=['1 + 1 =']",
            "data.eval.general=starter:general",
            "output_dir=2024",
        ],
    )
    assert recipe.learning_rate == 1e-4
    assert recipe.data.train[0].source == "notes.txt"
    assert recipe.data.train[0].weight == 2.0
    assert recipe.model.name == "starter"
    assert recipe.model.revision == "123"
    assert recipe.data.replay is not None
    assert recipe.data.replay.sources[1].first == 3
    assert recipe.prompts == ["1 + 1 ="]
    assert recipe.data.eval.general[0].source == "starter:general"
    assert recipe.output_dir == "2024"


def test_overrides_of_mappings_with_arbitrary_names() -> None:
    overrides = [
        "lora.rank_pattern.q_proj=8",
        "lora.rank_pattern.layers.0.mlp.up_proj=4",
        "lora.alpha_pattern.q_proj=1.5",
        "data.chat_template_kwargs.enable_thinking=false",
        "data.train.0.columns.output=12",
        "recompute.block=3",
    ]
    recipe = loads(MINIMAL + "lora: {alpha_pattern: {k_proj: 2}}\n", overrides)
    assert recipe.lora is not None
    assert recipe.lora.rank_pattern == {"q_proj": 8, "layers.0.mlp.up_proj": 4}
    assert recipe.lora.alpha_pattern == {"k_proj": 2, "q_proj": 1.5}
    assert recipe.data.chat_template_kwargs == {"enable_thinking": False}
    assert recipe.data.train[0].columns == {"output": "12"}
    assert recipe.recompute == {"block": 3}
    again = loads(dump(recipe), ["lora.rank_pattern.q_proj=9", "lora.rank_pattern.0=1"])
    assert again.lora is not None
    assert again.lora.rank_pattern == {"q_proj": 9, "layers.0.mlp.up_proj": 4, "0": 1}


def test_a_value_that_begins_with_an_asterisk_is_a_glob() -> None:
    assert loads(MINIMAL, ["data.train=*.jsonl"]).data.train[0].source == "*.jsonl"
    recipe = loads(MINIMAL, ["data.train=*.csv", "data.train.0.text_column=body"])
    assert (recipe.data.train[0].source, recipe.data.train[0].text_column) == ("*.csv", "body")
    assert message(MINIMAL, ("data.train=[*.csv]",)).startswith("'data.train=[*.csv]' uses a YAML anchor")


def test_an_override_replaces_the_mutually_exclusive_key() -> None:
    recipe = loads(MINIMAL + "num_train_epochs: 3\nwarmup_ratio: 0.1\n", ["max_steps=50", "warmup_steps=5"])
    assert (recipe.max_steps, recipe.num_train_epochs) == (50, None)
    assert (recipe.warmup_steps, recipe.warmup_ratio) == (5, 0.0)
    assert loads(MINIMAL + "max_steps: 50\n", ["num_train_epochs=2"]).num_train_epochs == 2.0


def test_an_override_expands_shorthands_and_creates_sections() -> None:
    assert loads("model: a\ndata: {train: x}\n", ["data.train.0.first=5"]).data.train[0].first == 5
    assert loads("model: a\ndata: {train: {source: x}}\n", ["data.train.0.first=5"]).data.train[0].first == 5


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("lerning_rate=1", "unknown key 'lerning_rate'{from}; did you mean 'learning_rate'?"),
        ("data.trian.0.weight=2", "unknown key 'trian' in data{from}; did you mean 'train'?"),
        ("data.train.0.wieght=2", "unknown key 'wieght' in data.train.0{from}; did you mean 'weight'?"),
        (
            "data.train.3.weight=2",
            "data.train is a list of length 1 and has no item '3'{from}; count from 0 to 0",
        ),
        ("packing=maybe", "packing must be true or false, not 'maybe'{from}"),
        (
            "learning_rate",
            "'learning_rate' is not an override; write key=value, for example learning_rate=1e-4",
        ),
        ("=3", "'=3' is not an override; write key=value, for example learning_rate=1e-4"),
        ("seed.x=3", "seed has no keys inside it{from}; write seed=value"),
        (
            "data.train.².weight=3",
            "data.train is a list of length 1 and has no item '²'{from}; count from 0 to 0",
        ),
        ("lora.rank_pattern.q_proj=x", "lora.rank_pattern.q_proj must be a whole number, not 'x'{from}"),
        (
            "lora.rank_pattern.=8",
            "'lora.rank_pattern.=8' is not an override; write key=value, for example learning_rate=1e-4",
        ),
    ],
)
def test_override_messages(override: str, expected: str) -> None:
    assert message(MINIMAL, (override,)) == expected.replace("{from}", f" (from '{override}')")


def test_overrides_of_mutually_exclusive_keys() -> None:
    for order in (1, -1):  # an override with null takes its own key away and no other
        overrides = ["num_train_epochs=null", "max_steps=5"][::order]
        assert loads(MINIMAL + "num_train_epochs: 1\n", overrides).max_steps == 5
    with pytest.raises(RecipeError, match="'max_steps=5' and 'num_train_epochs=2' both set"):
        loads(MINIMAL, ["max_steps=5", "num_train_epochs=2"])


@pytest.mark.parametrize(
    ("whole", "part"),
    [
        ("data.train=a", "data.train.0.source=b"),
        ("data.train=[a, b]", "data.train.1.source=c"),
        ("data.train=[{source: a, weight: 2}]", "data.train.0.weight=3"),
        ("data={train: a}", "data.train.0.source=b"),
        ("model={name: a}", "model.name=b"),
        ("lora={r: 8}", "lora.r=4"),
        ("lora={rank_pattern: {a.b: 8}}", "lora.rank_pattern.a.b=4"),
    ],
)
def test_setting_a_key_twice_by_different_paths_raises(whole: str, part: str) -> None:
    assert (
        message(MINIMAL, (whole, part)) == f"'{whole}' and '{part}' set the same key twice; give one of them"
    )


@pytest.mark.parametrize(
    ("whole", "part"),
    [
        ("data.train=[a, b]", "data.train.1.weight=2"),
        ("data.train={source: a}", "data.train.0.weight=2"),
        ("lora={r: 8}", "lora.lora_alpha=4"),
        ("lora={rank_pattern: {a: 8}}", "lora.rank_pattern.b=4"),
    ],
)
def test_a_section_and_another_key_in_it_are_valid_together(whole: str, part: str) -> None:
    loads(MINIMAL, [whole, part])
