"""choices.json and its types: they round-trip without loss, and damage is named."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from trimtab.adapt.spec import LoraSettings
from trimtab.facts.base_weights import BaseWeights
from trimtab.facts.errors import CheckpointError
from trimtab.facts.files import FileDigest
from trimtab.plan.resolved import AttentionConfig, MemoryPlan, OptimizerConfig, PrecisionConfig, Resolved
from trimtab.recipe import loads
from trimtab.run.choices import (
    Choices,
    DataPins,
    PlannedSteps,
    read_choices,
    read_model_choices,
    read_recipe,
    write_choices,
)
from trimtab.run.folder import RunFolder

BASE = BaseWeights("a/b", "abc", {"model.safetensors": FileDigest(3, "00")})
RESOLVED = Resolved(
    "cpu",
    threads=2,
    deterministic=True,
    precision=PrecisionConfig("fp32", "fp32", "fp32", "everything in fp32"),
    attention=AttentionConfig.uniform(2, "sdpa_flash"),
    optimizer=OptimizerConfig("adamw_8bit", "reference", "named"),
    memory=MemoryPlan(("none", "block")),
)
CHOICES = Choices(
    RESOLVED,
    loads("model: {name: a/b, added_tokens: [x]}\ndata: {train: t}\nsave_steps: 7"),
    model_commit="abc",
    tokenizer_commit=None,
    data=DataPins({"d": "c0"}, [{"fingerprint": "f", "files": [["n", 1, "d"]]}], train_source_first=True),
    base=BASE,
    started_from=dataclasses.replace(BASE, files={}, seed=3),
    planned_steps=(PlannedSteps(0, 20), PlannedSteps(10, 40)),
)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


@pytest.mark.parametrize(
    "choices",
    [
        CHOICES,
        dataclasses.replace(CHOICES, base=None, started_from=None, planned_steps=(), logs_checkpoints=False),
        dataclasses.replace(CHOICES, dropout_by_sequence=False),
    ],
)
def test_choices_round_trip(folder: RunFolder, choices: Choices) -> None:
    write_choices(folder, choices)
    found = read_choices(folder, num_layers=2)
    assert found.to_dict() == choices.to_dict()
    assert found.resolved == choices.resolved
    assert (found.data, found.base, found.started_from) == (choices.data, choices.base, choices.started_from)
    assert found.planned_steps == choices.planned_steps
    assert found.recipe == choices.recipe == read_recipe(folder)


def test_every_field_is_in_the_file(folder: RunFolder) -> None:
    """A field missing in `to_dict` would be read as its default."""
    for field in dataclasses.fields(Choices):
        other = {
            "resolved": dataclasses.replace(RESOLVED, threads=3),
            "recipe": loads("model: other\ndata: {train: t}"),
            "model_commit": "other",
            "tokenizer_commit": "other",
            "data": DataPins({}, []),
            "base": None,
            "started_from": None,
            "planned_steps": (PlannedSteps(0, 1),),
            "logs_checkpoints": False,
            "dropout_by_sequence": False,
        }[field.name]
        changed = dataclasses.replace(CHOICES, **{field.name: other})
        write_choices(folder, changed)
        assert getattr(read_choices(folder, 2), field.name) == other, field.name


def test_a_model_is_opened_from_a_file_with_the_recipe_alone(folder: RunFolder) -> None:
    recipe = CHOICES.to_dict()["recipe"]
    folder.choices.write_text(json.dumps({"version": 1, "recipe": recipe}))
    found = read_model_choices(folder)
    assert (found.save_steps, found.own_tokenizer, found.lora, found.model_commit) == (7, True, None, None)
    with pytest.raises(CheckpointError, match="lacks model_commit"):
        read_choices(folder, 2)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("data", {}),
        ("data", {"commits": {}}),
        ("base", {"source": 3, "files": {}}),
        ("lengths", [{"step": 0}]),
        ("lengths", [3]),
        ("attention", {}),
        ("optimizer", 5.5),
        ("compile", [1]),
        ("loss", 3),
        ("pointwise", [1]),
        ("graphs", 5.5),
        ("quantization", 5.5),
        ("parallel", [3]),
        ("lora", 5.5),
        ("memory", {"recompute": 5}),
    ],
)
def test_invalid_values_are_named(folder: RunFolder, key: str, value: object) -> None:
    folder.choices.write_text(json.dumps({**CHOICES.to_dict(), key: value}))
    with pytest.raises(CheckpointError, match=r"choices\.json is damaged") as error:
        read_choices(folder, 2)
    assert error.value.remedy.startswith(
        "restore the file from a copy, or train the recipe again: `trimtab train "
    )


def test_adapters_without_their_base_are_damage(folder: RunFolder) -> None:
    adapted = dataclasses.replace(CHOICES, resolved=dataclasses.replace(RESOLVED, lora=LoraSettings(r=4)))
    write_choices(folder, adapted)
    assert read_choices(folder, 2).base == BASE
    write_choices(folder, dataclasses.replace(adapted, base=None))
    with pytest.raises(CheckpointError, match="is damaged: it names no base model for its adapters"):
        read_choices(folder, 2)


def test_a_newer_file_is_refused(folder: RunFolder) -> None:
    folder.choices.write_text(json.dumps({**CHOICES.to_dict(), "version": 99}))
    for read in (read_model_choices, read_recipe, lambda folder: read_choices(folder, 2)):
        with pytest.raises(CheckpointError, match="newer trimtab"):
            read(folder)


@pytest.mark.parametrize(
    "data",
    [None, [], "a", {}, {"source": "a"}, {"source": "a", "files": {"x": {"size": True, "sha256": "0"}}}],
)
def test_base_weights_that_cannot_be(data: object) -> None:
    with pytest.raises(ValueError, match=r"."):
        BaseWeights.from_dict(data)
    assert BaseWeights.from_dict(BASE.to_dict()) == BASE
