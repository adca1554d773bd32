"""What users type behind a recipe: other tools' names, null, a key given twice, Python's own types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trimtab.facts.errors import RecipeError
from trimtab.recipe import Recipe, build, load, loads
from trimtab.recipe.other_names import ELSEWHERE, REFUSED
from trimtab.recipe.problems import _field, _written, all_keys, as_path, dotted, is_default_null

MINIMAL = "model: starter\ndata:\n  train: [notes.txt]\n"


def message(text: str, *overrides: str) -> str:
    with pytest.raises(RecipeError) as caught:
        loads(text, overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ("learning_rate=1", "learning_rate=2"),
            "'learning_rate=1' and 'learning_rate=2' set the same key twice; give one of them",
        ),
        (
            ("model=a", "model.name=b"),
            "'model=a' and 'model.name=b' set the same key twice; give one of them",
        ),
        (
            ("data.train.0.first=5", "data.train=x"),
            "'data.train=x' would discard 'data.train.0.first=5', which is given before it; "
            "give 'data.train.0.first=5' after it, or leave it out",
        ),
        (
            ("max_steps=1", "num_train_epochs=2"),
            "'max_steps=1' and 'num_train_epochs=2' both set the length of the run; give one of them",
        ),
        (
            ("gradient_checkpointing=true", "recompute=none"),
            "'recompute=none' and 'gradient_checkpointing=true' contradict each other; give one of them",
        ),
        (
            ("gradient_checkpointing=true", "recompute=block"),
            "'recompute=block' and 'gradient_checkpointing=true' say the same thing in two ways; give one of them",
        ),
    ],
)
def test_overrides_that_undo_each_other(overrides: tuple[str, ...], said: str) -> None:
    assert message(MINIMAL, *overrides) == said


def test_a_whole_and_then_its_parts_are_no_contradiction() -> None:
    recipe = loads(MINIMAL, ["model=a", "model.revision=main", "data.train=x", "data.train.0.first=5"])
    assert (recipe.model.name, recipe.model.revision, recipe.data.train[0].first) == ("a", "main", 5)


@pytest.mark.parametrize("key", [dotted(key) for key in all_keys() if is_default_null(key)])
def test_null_is_the_default_of_every_key_that_has_one(key: str) -> None:
    text = MINIMAL + "lora: {}\n"
    if key.startswith(("data.replay.", "data.eval.domain.", "data.eval.general.")):
        section = key.rpartition(".0.")[0] or key.rpartition(".")[0] + ".sources"
        assert loads(text, [f"{section}=[a]", f"{key}=null"]) == loads(text, [f"{section}=[a]"])
    else:
        assert loads(text, [f"{key}=null"]) == loads(text if key != "lora" else MINIMAL)
    assert loads(MINIMAL, [f"{key}=null"]) == loads(MINIMAL), "a section that is not there is not made for it"


def test_null_takes_out_what_the_file_says() -> None:
    text = MINIMAL + "eval_steps: 5\nlearning_rate: 0.1\nmax_steps: 7\nsave_steps: 3\nlora: {r: 4}\n"
    recipe = loads(text, ["eval_steps=null", "learning_rate=null", "num_train_epochs=null", "lora.r=null"])
    assert recipe.eval_steps is None
    assert recipe.learning_rate == Recipe.model_fields["learning_rate"].default
    assert recipe.max_steps == 7, "an epoch count that is taken out leaves the number of steps alone"
    assert recipe.lora is not None
    assert recipe.lora.r == 16
    assert loads(text, ["save_steps=null"]).save_steps is None, "null is a value of its own here"
    for key in ("model", "data.train", "data.train.0.source"):
        assert "has no value" in message(text, f"{key}=null")


@pytest.mark.parametrize(
    ("lines", "follow"),
    [
        ("probe: false\neval_steps: 5\ndata: {train: x, eval_share: 0}", ["eval_steps=null"]),
        ("data: {train: x}\nmax_steps: 5\nnum_train_epochs: 1", ["max_steps=null"]),
        ("data: {train: x}\nmax_steps: 5\nnum_train_epochs: 1", ["num_train_epochs=null"]),
        ("data: {train: x}\nwarmup_steps: 5\nwarmup_ratio: 0.1", ["warmup_ratio=null"]),
        ("data: {train: x}\nlr_scheduler_type: constant\nwarmup_steps: 5", ["warmup_steps=null"]),
        ("data: {train: x}\nlr_scheduler_type: constant\nmin_lr_ratio: 0.5", ["min_lr_ratio=null"]),
        ("data: {train: x}\noptim_implementation: triton", ["optim_implementation=null"]),
        ("data: {train: x}\nunpacked_layers: 3", ["unpacked_layers=null"]),
        ("data: {train: x}\nbnb_4bit_use_double_quant: false", ["bnb_4bit_use_double_quant=null"]),
        ("data: {train: x}\ngradient_checkpointing: true\nrecompute: none", ["gradient_checkpointing=null"]),
        ("data: {train: x}\ngradient_checkpointing: true\nrecompute: none", ["recompute=null"]),
        ("data: {train: x}\nload_in_4bit: true\nload_in_8bit: true\nlora: {}", ["load_in_8bit=null"]),
        ("data: {train: x}\nlora: {adapter: a, r: 8}", ["lora.r=null"]),
        ("data: {train: x}\nlora: {adapter: a, r: 8}", ["lora.adapter=null"]),
        (
            "data: {train: x, chat_template_kwargs: {messages: 1}}",
            ["data.chat_template_kwargs.messages=null"],
        ),
    ],
)
def test_what_rules_advise_is_named_and_accepted(lines: str, follow: list[str]) -> None:
    text = f"model: starter\n{lines}\n"
    said = message(text)
    assert all(override in said for override in follow), said
    loads(text, follow)


def test_checkpointing_that_contradicts_is_said_to() -> None:
    said = message(MINIMAL + "gradient_checkpointing: true\nrecompute: none\n")
    assert "gradient_checkpointing: true (recompute: block) and recompute: none contradict each other" in said
    assert "are both given" in message(MINIMAL + "gradient_checkpointing: false\nrecompute: none\n")


@pytest.mark.parametrize(
    ("limit", "part"),
    [
        ("200%", "is more than the device has"),
        ("24", "has no unit"),
        ("lots", "is neither a size nor a share above 0"),
        ("24PB", "is neither a size nor a share above 0"),
    ],
)
def test_memory_limits(limit: str, part: str) -> None:
    assert f"memory_limit: {limit} {part}; write it like 24GiB, 24GB or 80%" in message(
        MINIMAL, f"memory_limit={limit}"
    )
    assert loads(MINIMAL, ["memory_limit=24gb"]).memory_limit == "24gb"


@pytest.mark.parametrize("name", sorted(ELSEWHERE))
def test_another_tools_name_is_answered_with_a_key_that_works(name: str) -> None:
    key = as_path(ELSEWHERE[name])
    assert f"unknown key '{name}'" in message(MINIMAL, f"{name}=1")
    assert f"did you mean '{ELSEWHERE[name]}'?" in message(MINIMAL, f"{name}=1")
    field = _field(key)
    assert field is not None, ELSEWHERE[name]
    example = _written((field.examples or [1])[0])
    given = [f"{ELSEWHERE[name]}={example}"]
    if ELSEWHERE[name] == "early_stopping_patience":  # it counts evaluations
        given.append("eval_steps=5")
    loads(MINIMAL, given)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_name_without_a_counterpart_is_answered_with_what_to_do(name: str) -> None:
    assert message(MINIMAL, f"{name}=1") == f"unknown key '{name}' (from '{name}=1'); {REFUSED[name]}"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "base_model: a\ndatasets: [b]\n",
            "2 problems in recipe.yaml:\n"
            "  - unknown key 'base_model' (line 1); did you mean 'model.name'?\n"
            "  - unknown key 'datasets' (line 2); did you mean 'data.train'?",
        ),
        (
            "model: {name: a, load_in_4bit: true}\ndata: {train: x}\n",
            "unknown key 'load_in_4bit' in model (line 1); "
            "did you mean 'load_in_4bit' at the top level of the recipe?",
        ),
        (
            MINIMAL + "lora: {lora_r: 8}\n",
            "unknown key 'lora_r' in lora (line 4); did you mean 'r'?",
        ),
        (
            "model: a\ndata: {train: x, eval: {domain: [{path: y}]}}\n",
            "unknown key 'path' in data.eval.domain.0 (line 2); did you mean 'source'?",
        ),
    ],
)
def test_names_at_other_levels(text: str, said: str) -> None:
    assert message(text) == said


def test_number_formats_as_torch_writes_them() -> None:
    recipe = loads(MINIMAL, ["dtype=bfloat16", "weights_dtype=torch.float32", "lora.dtype=bfloat16"])
    assert recipe.lora is not None
    assert (recipe.dtype, recipe.weights_dtype, recipe.lora.dtype) == ("bf16", "fp32", "bf16")
    assert "is not one of auto, fp32, bf16, fp16" in message(MINIMAL, "dtype=int8")


def test_paths_and_tuples_of_python_are_accepted(tmp_path: Path) -> None:
    recipe = build({
        "model": tmp_path / "model",
        "data": {"train": tmp_path / "a.txt", "eval": {"general": (tmp_path / "b.txt",)}, "cache_dir": tmp_path},
        "output_dir": tmp_path / "run",
    })  # fmt: skip
    assert recipe.model.name == str(tmp_path / "model")
    assert recipe.data.train[0].source == str(tmp_path / "a.txt")
    assert recipe.data.eval.general[0].source == str(tmp_path / "b.txt")
    assert recipe.output_dir == str(tmp_path / "run")


LONG = "once upon a time there was a very long text " * 200


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"model": LONG}, "model.name"),
        ({"model": {"name": "a", "tokenizer": LONG}}, "model.tokenizer"),
        ({"data": {"train": [LONG]}}, "data.train.0.source"),
        ({"data": {"train": "a", "eval": {"general": LONG}}}, "data.eval.general.0.source"),
        ({"data": {"train": "a", "cache_dir": LONG}}, "data.cache_dir"),
        ({"lora": {"adapter": LONG}}, "lora.adapter"),
        ({"output_dir": LONG}, "output_dir"),
        ({"output_dir": "a\0b"}, "output_dir"),
        ({"output_dir": "~no-such-user-here/a"}, "output_dir"),
    ],
)
def test_texts_that_cannot_be_names_are_refused_with_their_key(data: dict[str, Any], key: str) -> None:
    with pytest.raises(RecipeError, match=f"^{key} ") as caught:
        build({"model": "starter", "data": {"train": "a"}, **data})
    assert len(str(caught.value)) < 300


def test_a_recipe_by_a_long_name() -> None:
    with pytest.raises(RecipeError, match="the recipe is a text of 8,800 characters"):
        load(LONG)
