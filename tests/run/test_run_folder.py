"""A run folder: its lock, the cleanup after failed starts, atomic writes of small files."""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from trimtab.checkpoint import RunLock
from trimtab.facts.errors import CheckpointError, ResourceError
from trimtab.run.folder import RunFolder, read_json, write_json, write_text


def test_a_new_folder_is_created_locked_and_removed_after_a_failed_start(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a" / "run")
    with contextlib.suppress(RuntimeError), folder.create("model: x"):
        write_text(folder.recipe, "model: x")
        folder.checkpoints.mkdir()
        with pytest.raises(CheckpointError, match="in use"):
            RunLock(folder.path).acquire()
        raise RuntimeError
    assert not folder.path.exists()


def test_an_interrupted_creation_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RunFolder(tmp_path / "run")

    def interrupt(_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(RunFolder, "_clear", interrupt)
    with contextlib.suppress(KeyboardInterrupt), folder.create("model: x"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_kept_and_emptied(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with folder.create("model: x"):
        write_json(folder.choices, {})
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    with folder.create("model: x"):  # and may be used again
        pass


@pytest.mark.parametrize("what", ["metrics", "checkpoint"])
def test_trained_steps_are_kept(tmp_path: Path, what: str) -> None:
    folder = RunFolder(tmp_path / "run")
    with contextlib.suppress(KeyboardInterrupt), folder.create("model: x"):
        if what == "metrics":
            folder.metrics.write_text('{"kind": "memory"}\n{"kind": "train", "step": 1}\n')
        else:
            (folder.checkpoints / "step-00000001").mkdir(parents=True)
            assert not folder.began()  # an empty folder is no checkpoint
            (folder.checkpoints / "step-00000001" / "manifest.json").write_text("{}")
        raise KeyboardInterrupt
    assert folder.began()
    with pytest.raises(CheckpointError, match="already contains a run"):
        folder.check_new()


def test_foreign_files_are_never_touched(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / "recipe.yaml").write_text("mine")  # ours by name, but no lock of ours lies next to it
    with pytest.raises(CheckpointError, match="not empty"):
        folder.check_new()
    (tmp_path / ".lock").write_text("")
    (tmp_path / ".git").mkdir()
    with pytest.raises(CheckpointError, match=r"\.git"), folder.create("model: x"):
        pass
    assert (tmp_path / "recipe.yaml").read_text() == "mine"
    assert (tmp_path / ".git").is_dir()


def test_files_that_appear_during_a_failed_start_are_not_deleted(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with contextlib.suppress(RuntimeError), folder.create("model: x"):
        (folder.path / "notes.txt").write_text("mine")
        raise RuntimeError
    assert (folder.path / "notes.txt").read_text() == "mine"


def test_small_files_are_written_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


STARTS = """
import sys
from pathlib import Path
from trimtab.facts.errors import CheckpointError
from trimtab.run.folder import RunFolder

folder = RunFolder(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
begun = 0
for _ in range(400):
    try:
        with folder.create("model: x"):
            assert folder.recipe.read_text() == "model: x"
            begun += 1
    except CheckpointError as error:
        assert "is in use by" in str(error), error
print(begun)
"""


def test_two_processes_that_start_the_same_run_do_not_remove_each_others_drafts(tmp_path: Path) -> None:
    """Each start owns the folder or raises because the other one does; no draft remains."""
    code = STARTS.replace(
        "import sys\n", "import sys\nimport trimtab.checkpoint.lock as l; l.PROBE_SECONDS = 0\n", 1
    )
    words = [sys.executable, "-c", code, str(tmp_path / "run")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(words, **pipes) for _ in range(2)]  # type: ignore[call-overload]
    for one in both:
        assert one.stdout.readline() == "ready\n"
    for one in both:
        one.stdin.write("go\n")
        one.stdin.flush()
    for one in both:
        out, err = one.communicate(timeout=60)
        assert one.returncode == 0, err
        assert int(out) > 0
    assert list(tmp_path.iterdir()) == []


def test_the_draft_of_a_killed_start_is_removed_and_that_of_a_live_one_is_not(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    killed = tmp_path / f".run.starting-{ended.pid}-1"
    live = tmp_path / ".run.starting-1-1"
    locked = tmp_path / f".run.starting-{ended.pid}-2"
    for path in (killed, live, locked):
        path.mkdir()
    with RunLock(locked), RunFolder(tmp_path / "run").create("model: x"):
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted([live.name, locked.name, "run"])


def test_a_folder_with_spaces_is_quoted_in_the_command_that_continues_it(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "ü b ☃")
    run.path.mkdir()
    run.metrics.write_text('{"kind": "train", "step": 1}\n')
    with pytest.raises(CheckpointError) as caught:
        run.check_new()
    command = str(caught.value).split("`")[1]
    assert shlex.split(command) == ["trimtab", "train", "--resume", str(run.path)]
