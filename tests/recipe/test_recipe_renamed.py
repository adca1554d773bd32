"""Former names of recipe keys: they work, with a FutureWarning, in files, overrides and Python."""

from __future__ import annotations

import warnings

import pytest

from trimtab.facts.errors import RecipeError
from trimtab.recipe import build, loads
from trimtab.recipe.loading import dump

TEXT = "model: starter\ndata: {train: x}\nlora: {r: 2}\nload_in_4bit: true\n"


def test_a_former_name_works_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match="unpacked_layers is now called dequantized_layers"):
        recipe = loads(TEXT + "unpacked_layers: 3\n")
    assert recipe.dequantized_layers == 3
    assert "dequantized_layers: 3" in dump(recipe)
    with pytest.warns(FutureWarning, match=r"data\.eval_windows is now called eval_sequences"):
        nested = build({"model": "starter", "data": {"train": "x", "eval_windows": 7}})
    assert nested.data.eval_sequences == 7


def test_a_former_name_in_an_override_works_with_a_warning() -> None:
    with pytest.warns(FutureWarning, match="unpacked_layers is now called dequantized_layers") as caught:
        assert loads(TEXT, ["unpacked_layers=auto"]).dequantized_layers == "auto"
    assert len(caught) == 1
    with pytest.warns(FutureWarning, match=r"data\.eval_windows is now called eval_sequences"):
        assert loads(TEXT, ["data.eval_windows=5"]).data.eval_sequences == 5


def test_defaults_that_earlier_versions_wrote_give_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loads(TEXT + "unpacked_layers: auto\n").dequantized_layers == "auto"


def test_both_names_are_an_error() -> None:
    with pytest.raises(RecipeError, match="former name of dequantized_layers, and both are given"):
        loads(TEXT + "unpacked_layers: 1\ndequantized_layers: 2\n")


def test_a_bad_value_is_reported_with_its_line() -> None:
    with pytest.raises(RecipeError, match=r"dequantized_layers cannot be -1 \(line 5\)"):
        loads(TEXT + "unpacked_layers: -1\n")
