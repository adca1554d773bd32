"""trimtab from Python: load, train, plan, generate, save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tiny_model import write_texts, write_tiny_model

import trimtab
from trimtab.report import LiveView


@pytest.fixture
def recipe(tmp_path: Path) -> dict[str, Any]:
    write_tiny_model(tmp_path / "model")
    return {
        "model": str(tmp_path / "model"),
        "data": {
            "train": [str(write_texts(tmp_path / "train.jsonl", 1, 40))],
            "cache_dir": str(tmp_path / "cache"),
            "num_proc": 1,
        },
        "max_seq_length": 64,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "max_steps": 3,
        "dtype": "fp32",
        "device": "cpu",
        "logging_steps": 1,
        "probe": False,
        "output_dir": str(tmp_path / "run"),
    }


def quiet() -> LiveView:
    return LiveView(console=Console(quiet=True))


def losses(run: trimtab.RunResult) -> list[float]:
    return [row["loss"] for row in run.data().of("train")]


def test_load_train_generate_save(recipe: dict[str, Any], tmp_path: Path) -> None:
    run = trimtab.train(recipe, view=quiet())
    assert (run.status, run.step) == ("finished", 3)
    assert (run.folder / "report.html").is_file()
    model = run.model()
    text = model.generate("the cat", max_new_tokens=6)
    assert text == run.model("3").generate("the cat", max_new_tokens=6)
    assert model.complete("the cat", max_new_tokens=6).finish_reason in ("length", "eos")
    receipt = model.save(tmp_path / "saved", dtype="fp32")
    assert receipt.parent == run.folder / "receipts"
    assert receipt.name.startswith("export-hf-saved-")
    assert receipt.is_file()
    assert trimtab.load(tmp_path / "saved").generate("the cat", max_new_tokens=6) == text
    with pytest.raises(trimtab.TrimtabError, match="exists already"):
        model.save(tmp_path / "saved")


def test_a_dict_and_a_file_with_overrides_train_the_same(recipe: dict[str, Any], tmp_path: Path) -> None:
    import json

    first = trimtab.train({**recipe, "learning_rate": 1e-3}, view=quiet())
    (tmp_path / "recipe.yaml").write_text(json.dumps({**recipe, "max_steps": 9}))
    second = trimtab.train(
        tmp_path / "recipe.yaml",
        view=quiet(),
        learning_rate=1e-3,
        max_steps=3,
        output_dir=str(tmp_path / "second"),
    )
    assert losses(first) == losses(second)
    assert len(losses(first)) == 3


def test_plan_from_python(recipe: dict[str, Any], tmp_path: Path) -> None:
    plan = trimtab.plan_run(recipe, per_device_train_batch_size=4, num_train_epochs=2.0)
    assert plan["memory"]["peak"]["activations"] > trimtab.plan_run(recipe)["memory"]["peak"]["activations"]
    assert not (tmp_path / "run").exists()


def test_resume_from_python(recipe: dict[str, Any], tmp_path: Path) -> None:
    whole = trimtab.train({**recipe, "lr_scheduler_type": "constant", "max_steps": 5}, view=quiet())
    trimtab.train(
        {**recipe, "lr_scheduler_type": "constant", "output_dir": str(tmp_path / "two")}, view=quiet()
    )
    run = trimtab.resume(tmp_path / "two", view=quiet(), max_steps=5)
    assert run.step == 5
    assert losses(run) == losses(whole)


def test_user_errors_are_trimtab_errors(recipe: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(trimtab.TrimtabError, match="learning_rate"):
        trimtab.train({**recipe, "learning_rat": 1.0}, view=quiet())
    with pytest.raises(trimtab.TrimtabError, match="absent"):
        trimtab.load(tmp_path / "absent")
    with pytest.raises(trimtab.TrimtabError, match="int4"):
        trimtab.load(tmp_path / "model", dtype="int4")
    with pytest.raises(trimtab.TrimtabError, match="tpu"):
        trimtab.load(tmp_path / "model", device="tpu")
    assert not (tmp_path / "run").exists()


def test_the_default_length_fits_a_small_model(recipe: dict[str, Any]) -> None:
    """The tiny model has 128 positions, as many as are written by default."""
    assert trimtab.load(recipe["model"]).complete("the cat and").finish_reason in ("length", "eos")


def test_public_names_do_not_depend_on_earlier_imports() -> None:
    """A function with the name of a submodule would be replaced when the submodule is imported."""
    import importlib
    import pkgutil

    parts = {info.name for info in pkgutil.iter_modules(trimtab.__path__)}
    assert parts & set(trimtab.__all__) == set()
    for name in trimtab.__all__:
        assert getattr(importlib.import_module("trimtab"), name) is not None


def test_one_stop_string_is_not_split_into_letters(recipe: dict[str, Any]) -> None:
    model = trimtab.load(recipe["model"], dtype="fp32", device="cpu")
    whole = model.generate("the cat", max_new_tokens=12)
    assert model.generate("the cat", max_new_tokens=12, stop="never in there, not even once") == whole
