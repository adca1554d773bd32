"""A run folder: who may have it, what a failed start takes away, and that its small files are never half there."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from trimtab.checkpoint import RunLock
from trimtab.facts.errors import CheckpointError, ResourceError
from trimtab.run.folder import RunFolder, read_json, write_json, write_text


def test_a_new_folder_is_made_locked_and_taken_away_again(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a" / "run")
    with contextlib.suppress(RuntimeError), folder.create("model: x"):
        write_text(folder.recipe, "model: x")
        folder.checkpoints.mkdir()
        with pytest.raises(CheckpointError, match="in use"):
            RunLock(folder.path).acquire()
        raise RuntimeError
    assert not folder.path.exists()


def test_a_folder_that_was_there_stays_and_is_emptied(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with folder.create("model: x"):
        write_json(folder.choices, {})
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    with folder.create("model: x"):  # and may be used again
        pass


@pytest.mark.parametrize("what", ["metrics", "checkpoint"])
def test_what_was_learnt_stays(tmp_path: Path, what: str) -> None:
    folder = RunFolder(tmp_path / "run")
    with contextlib.suppress(KeyboardInterrupt), folder.create("model: x"):
        if what == "metrics":
            folder.metrics.write_text('{"kind": "memory"}\n{"kind": "train", "step": 1}\n')
        else:
            (folder.checkpoints / "step-00000001").mkdir(parents=True)
        raise KeyboardInterrupt
    assert folder.began()
    with pytest.raises(CheckpointError, match="already holds a run"):
        folder.check_new()


def test_foreign_files_are_never_touched(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / "recipe.yaml").write_text("mine")  # ours by name, but no lock of ours lies beside it
    with pytest.raises(CheckpointError, match="not empty"):
        folder.check_new()
    (tmp_path / ".lock").write_text("")
    (tmp_path / ".git").mkdir()
    with pytest.raises(CheckpointError, match=r"\.git"), folder.create("model: x"):
        pass
    assert (tmp_path / "recipe.yaml").read_text() == "mine"
    assert (tmp_path / ".git").is_dir()


def test_files_that_appear_during_a_failed_start_are_left_alone(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with contextlib.suppress(RuntimeError), folder.create("model: x"):
        (folder.path / "notes.txt").write_text("mine")
        raise RuntimeError
    assert (folder.path / "notes.txt").read_text() == "mine"


def test_small_files_are_whole_or_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    write_json(path, {"a": 1})

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ResourceError, match="No space left"):
        write_json(path, {"a": 2})
    assert read_json(path) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00"])
def test_damaged_json_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "choices.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"choices\.json"):
        read_json(tmp_path / "choices.json")
