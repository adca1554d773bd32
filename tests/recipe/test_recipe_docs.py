"""Generated pages are up to date, shipped recipes have their documented settings, and no torch is imported."""

from __future__ import annotations

import json
import subprocess
import sys
import typing
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import TypeAdapter

from trimtab.recipe import keys, load, schema
from trimtab.recipe.docs import files
from trimtab.recipe.problems import all_keys, section_at
from trimtab.recipe.yaml_text import read

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


def test_generated_files_are_up_to_date() -> None:
    for path, text in files(ROOT / "docs"):
        assert path.read_text(encoding="utf-8") == text, (
            f"run `python -m trimtab.recipe.docs` to renew {path.name}"
        )


def test_every_key_is_described_with_an_example() -> None:
    for path in all_keys():
        section = section_at(path[:-1])
        assert section is not None
        field = section.model_fields[str(path[-1])]
        assert field.description, path
        assert field.examples or path in [("data",), ("data", "eval")], path


def test_examples_are_valid() -> None:
    for path in all_keys():
        section = section_at(path[:-1])
        assert section is not None
        field = section.model_fields[str(path[-1])]
        kind = TypeAdapter(Annotated[field.annotation, field])
        for example in field.examples or []:
            kind.validate_python(example)


def test_examples_are_valid_together() -> None:
    for key, field in keys.Recipe.model_fields.items():
        for example in field.examples or []:
            base = {"model": "a", "data": {"train": "x"}, "lr_scheduler_type": "cosine"}
            base |= {"eval_steps": 100, "early_stopping_patience": 3}
            keys.Recipe.model_validate(base | {key: example})


def accepts(node: dict[str, Any], value: Any) -> bool:
    """Whether a value matches a JSON schema; supports the keywords that the recipe's schema uses."""
    if "$ref" in node:
        node = schema()["$defs"][node["$ref"].rsplit("/", 1)[1]]
    if "anyOf" in node and not any(accepts(option, value) for option in node["anyOf"]):
        return False
    if ("enum" in node and value not in node["enum"]) or ("const" in node and value != node["const"]):
        return False
    kinds = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None),
             "object": dict, "array": list}  # fmt: skip
    kind = node.get("type")
    if kind and (not isinstance(value, kinds[kind]) or (isinstance(value, bool) and kind != "boolean")):
        return False
    if isinstance(value, int | float) and not isinstance(value, bool) and "exclusiveMinimum" in node:
        return value > node["exclusiveMinimum"]
    if kind == "object":
        known = node.get("properties", {})
        return (
            set(value) <= set(known)
            and set(node.get("required", [])) <= set(value)
            and all(accepts(known[key], item) for key, item in value.items())
        )
    return kind != "array" or all(accepts(node["items"], item) for item in value)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_shipped_recipes_load_and_match_the_schema(path: Path) -> None:
    assert load(path).output_dir == f"runs/{path.stem}"
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# yaml-language-server: $schema=../docs/recipe.schema.json\n")
    assert accepts(schema(), read(text, path.name)[0])


@pytest.mark.parametrize(
    "name",
    [
        "qwen3-0.6b-math",
        "smollm2-135m-math",
        "smollm2-135m-lora",
        "qwen3-0.6b-qlora",
        "qwen3-8b-qlora",
        "llama3.1-8b-qlora",
    ],
)
def test_every_line_of_the_reference_recipes_has_a_comment(name: str) -> None:
    text = (ROOT / "recipes" / f"{name}.yaml").read_text(encoding="utf-8")
    assert not [line for line in text.splitlines() if line.strip() and "#" not in line]


def test_schema_agrees_with_loading() -> None:
    assert accepts(schema(), {"model": "a", "data": {"train": ["x", {"source": "y"}]}, "report_to": "none"})
    assert accepts(schema(), {"model": {"name": "a"}, "data": {"train": "x"}, "eval_steps": None})
    for bad in (
        {"lerning_rate": 1},
        {"packing": "yes"},
        {"optim": "adam"},
        {"learning_rate": 0},
        {"model": 1},
    ):
        assert not accepts(schema(), {"model": "a", "data": {"train": "x"}, **bad}), bad


def test_the_reference_recipe_has_its_documented_settings() -> None:
    recipe = load(ROOT / "recipes" / "qwen3-0.6b-math.yaml")
    (source,) = recipe.data.train
    assert recipe.model.name == "Qwen/Qwen3-0.6B-Base"
    assert (source.source, source.first) == ("pritamdeb68/Math-Pretraining-Data", 10_000)
    assert (recipe.max_seq_length, recipe.packing) == (1024, True)
    assert (recipe.per_device_train_batch_size, recipe.gradient_accumulation_steps) == (4, 4)
    assert (recipe.learning_rate, recipe.weight_decay, recipe.num_train_epochs) == (2e-5, 0.01, 1.0)
    assert (recipe.optim, recipe.dtype, recipe.gradient_dtype) == ("adamw_8bit", "bf16", "bf16")
    assert not recipe.load_in_4bit
    assert recipe.data.eval.general
    assert recipe.data.replay is None


def test_the_small_reference_recipe_differs_only_in_its_model() -> None:
    big, small = (
        load(ROOT / "recipes" / f"{name}.yaml").model_dump()
        for name in ("qwen3-0.6b-math", "smollm2-135m-math")
    )
    assert small["model"]["name"] == "HuggingFaceTB/SmolLM2-135M"
    assert {key for key in big if big[key] != small[key]} == {"model", "output_dir"}


def test_literals_of_keys_equal_the_lists_of_the_packages() -> None:
    from trimtab.adapt.spec_recompute import POLICIES
    from trimtab.data.spec import BAD_ROWS, DOCUMENT_MODES, FORMATS, TRAIN_ON
    from trimtab.kernels.adamw8bit import spec as adamw8bit
    from trimtab.kernels.attention.spec import IMPLS
    from trimtab.optim.spec import OPTIMIZERS, SCHEDULES
    from trimtab.starter import FIELDS
    from trimtab.trainer.tracking import SINKS

    assert typing.get_args(keys.Attention) == ("auto", *IMPLS)
    assert typing.get_args(keys.Optimizer) == tuple(OPTIMIZERS)
    assert typing.get_args(keys.Schedule) == tuple(SCHEDULES)
    assert typing.get_args(keys.MathField) == tuple(FIELDS)
    assert typing.get_args(keys.Documents) == tuple(DOCUMENT_MODES)
    assert typing.get_args(keys.RowFormat) == FORMATS
    assert typing.get_args(keys.TrainOn) == TRAIN_ON
    assert typing.get_args(keys.BadRows) == BAD_ROWS
    assert typing.get_args(keys.Policy) == POLICIES
    assert typing.get_args(keys.OptimizerImplementation) == ("auto", *adamw8bit.IMPLS)
    assert typing.get_args(keys.Tracker) == SINKS


def test_no_torch() -> None:
    code = (
        "import sys, trimtab.recipe, trimtab.plan, trimtab.facts.devices\n"
        "trimtab.recipe.loads('model: a\\ndata: {train: x}')\n"
        "trimtab.recipe.schema(), trimtab.recipe.check_resume\n"
        "[getattr(trimtab.plan, name) for name in trimtab.plan.__all__]\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_the_schema_is_plain_json() -> None:
    assert json.loads(json.dumps(schema())) == schema()
