"""Notes on a model's config.json before training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import call
from tiny_model import write_recipe, write_tiny_model

from trimtab.recipe import loads
from trimtab.run.prepare import prepare


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({}, None),
        ({"use_cache": False, "transformers_version": "5.0"}, None),
        ({"logit_scale": 0.5}, "has the key logit_scale, which trimtab does not support and ignores"),
        ({"a": 1, "b": None}, "has the keys a, b, which"),
    ],
)
def test_unknown_keys_of_a_config_are_a_note_of_the_plan(
    keys: dict[str, object], named: str | None, tmp_path: Path
) -> None:
    folder = write_tiny_model(tmp_path / "model")
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **keys}))
    recipe = loads(f"model: {folder}\ndata: {{train: x}}\nmax_seq_length: 32\ndevice: cpu")
    found = [note for note in prepare(recipe).plan.notes if "config.json" in note]
    assert [named in note for note in found if named] == ([True] if named else [])
    assert bool(found) == bool(named)


def test_plan_and_train_print_the_same_notes(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, num_train_epochs=None, max_steps=1)
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "logit_scale": 0.5}))
    for verb in ("plan", "train"):
        code, said = call(verb, recipe)
        assert code == 0, said
        assert "note: " in said.partition("logit_scale")[0].splitlines()[-1], (verb, said)
