"""Property-based tests: a dumped recipe loads to an equal recipe, for any valid recipe."""

from __future__ import annotations

import json
import typing
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from trimtab.facts.errors import RecipeError
from trimtab.recipe import build, dump, loads, to_dict
from trimtab.recipe.keys import Attention, Optimizer, Recipe, Schedule
from trimtab.recipe.yaml_text import read, write

SETTINGS = settings(max_examples=60, deadline=None)

# What UTF-8 can carry: no lone surrogates. Strings that look like other YAML values are mixed in on purpose.
TRICKY = [
    "on",
    "yes",
    "null",
    "~",
    "2e-5",
    "1_000",
    "0x1f",
    "2024-01-01",
    "true",
    "<<",
    "- a",
    "a: b",
    "#x",
    "'",
    "12:30",
]
# Names that no file can have are refused: tests/recipe/test_recipe_overrides.py.
written = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=40
).filter(lambda text: not text.startswith("~"))
words = st.one_of(st.sampled_from(TRICKY), written)
optional_words = st.none() | words
counts = st.integers(1, 10**9)
sources = st.one_of(
    words,
    st.fixed_dictionaries(
        {"source": words},
        optional={
            "split": words,
            "config": optional_words,
            "revision": optional_words,
            "text_column": optional_words,
            "first": st.none() | counts,
            "weight": st.floats(1e-6, 1000),
        },
    ),
)
source_lists = st.lists(sources, min_size=1, max_size=3)


@st.composite
def recipes(draw: st.DrawFn) -> dict[str, Any]:
    """Plain data of a valid recipe."""
    data = draw(
        st.fixed_dictionaries(
            {"train": sources | source_lists},
            optional={
                "replay": st.none()
                | st.fixed_dictionaries(
                    {"sources": source_lists}, optional={"share": st.floats(0.001, 0.999)}
                ),
                "eval": st.fixed_dictionaries({}, optional={"domain": source_lists, "general": source_lists}),
                "eval_share": st.floats(0, 0.5),
                "num_proc": st.none() | counts,
            },
        )
    )
    recipe = draw(
        st.fixed_dictionaries(
            {"model": words, "data": st.just(data)},
            optional={
                "learning_rate": st.floats(1e-12, 10),
                "max_grad_norm": st.floats(0, 1e9) | st.integers(0, 5),
                "seed": st.integers(0, 2**63 - 1),
                "optim": st.sampled_from(typing.get_args(Optimizer)),
                "lr_scheduler_type": st.sampled_from(typing.get_args(Schedule)),
                "packing": st.booleans(),
                "output_dir": words,
                "prompts": st.lists(words, max_size=3),
                "eval_steps": st.none() | counts,
                "save_steps": st.none() | counts,
                "gradient_dtype": st.sampled_from(["fp32", "bf16"]),
                "report_to": st.sampled_from(["none", "wandb", ["tensorboard", "wandb"]]),
            },
        )
    )
    if draw(st.booleans()):
        impl = draw(st.sampled_from(typing.get_args(Attention)))
        recipe["model"] = {
            "name": recipe["model"],
            "attn_implementation": impl,
            "revision": draw(optional_words),
        }
    return recipe | draw(st.sampled_from([{}, {"max_steps": 7}, {"num_train_epochs": 2.5}]))


@SETTINGS
@example({"model": "\x85", "data": {"train": "\u2028 a\n\n b\ufeff "}})
@given(recipes())
def test_dump_loads_to_an_equal_recipe(data: dict[str, Any]) -> None:
    recipe = build(data)
    text = dump(recipe)
    assert loads(text) == recipe
    assert dump(loads(text)) == text
    assert build(json.loads(json.dumps(to_dict(recipe)))) == recipe


scalars = words | st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
nested = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)


@SETTINGS
@given(nested)
def test_yaml_is_read_back_as_it_was_written(data: Any) -> None:
    back, _ = read(write({"x": data}), "t")
    assert back == {"x": data}
    assert repr(back) == repr({"x": data})


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=200))
def test_any_text_gives_a_recipe_or_a_recipe_error(text: str) -> None:
    try:
        recipe = loads(text)
    except RecipeError:
        return
    assert isinstance(recipe, Recipe)


@SETTINGS
@given(recipes(), st.sampled_from(["seed", "max_seq_length", "logging_steps"]), st.integers(8, 10**6))
def test_an_override_sets_its_key_and_no_other(data: dict[str, Any], key: str, value: int) -> None:
    text = dump(build(data))
    before, after = to_dict(loads(text)), to_dict(loads(text, [f"{key}={value}"]))
    assert after[key] == value
    assert {k for k in after if after[k] != before[k]} <= {key}
