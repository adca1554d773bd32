"""A trained tiny run that every test may read, and a fixture that calls the command line."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_world import Call, CommandResult, World
from tiny_model import write_recipe, write_texts, write_tiny_model

from trimtab.cli.main import main


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("world")
    # Constant learning rate: its number of steps may be raised on resume.
    recipe = write_recipe(
        folder,
        num_train_epochs=None,
        max_steps=6,
        lr_scheduler_type="constant",
        prompts=["the cat"],
        logging_steps=1,
        eval_steps=3,
    )
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        assert main(["train", str(recipe)]) == 0
    return World(folder, recipe, folder / "model", folder / "run", shown.getvalue())


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs `cli("train", path, "key=value")`; returns exit code, output and errors."""

    def call(*words: object) -> CommandResult:
        capsys.readouterr()
        code = main([str(word) for word in words])
        return CommandResult(code, *capsys.readouterr())

    return call


@pytest.fixture
def job(tmp_path: Path, world: World) -> Callable[..., Path]:
    """Writes a recipe of two steps in `tmp_path`; keys of `data` are passed as `data_…`."""

    def write(**changes: Any) -> Path:
        data: dict[str, Any] = {
            "train": [str(tmp_path / "texts.jsonl")],
            "eval_share": 0,
            "cache_dir": str(tmp_path / "cache"),
            "num_proc": 1,
        }
        for key in [key for key in changes if key.startswith("data_")]:
            data[key.removeprefix("data_")] = changes.pop(key)
        small: dict[str, Any] = {
            "model": str(world.model),
            "data": data,
            "num_train_epochs": None,
            "max_steps": 2,
            "eval_steps": None,
            "save_steps": None,
            "logging_steps": 1,
            "eval_on_start": False,
            "gradient_accumulation_steps": 1,
        }
        path = write_recipe(tmp_path, **{**small, **changes})
        write_texts(tmp_path / "texts.jsonl", 5, 30)
        return path

    # write_recipe creates a model if there is none; use the session's model instead.
    (tmp_path / "model").symlink_to(world.model)
    return write


@pytest.fixture
def model_copy(tmp_path: Path) -> Path:
    """A separate tiny model, which the test may damage."""
    return write_tiny_model(tmp_path / "own-model")
