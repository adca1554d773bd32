"""`trimtab runs` and `trimtab.runs`: every state a run folder can be in, in a table, as JSON and as objects."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from cli_world import Call, World

import trimtab
from trimtab.checkpoint import RunLock
from trimtab.checkpoint.lock import is_locked


@pytest.fixture
def folder(world: World, tmp_path: Path) -> Path:
    """Six runs: finished, stopped, begun only, without checkpoints, without choices.json, all checkpoints damaged."""
    runs = tmp_path / "runs"
    for name in ("done", "nested/stopped", "begun", "gone", "unchosen", "broken"):
        shutil.copytree(world.run, runs / name)
    stopped = runs / "nested" / "stopped"
    shutil.rmtree(stopped / "checkpoints" / "step-00000006")
    lines = (stopped / "metrics.jsonl").read_text().splitlines(keepends=True)
    (stopped / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] <= 5))
    for name in ("choices.json", "metrics.jsonl", "plan.json"):
        (runs / "begun" / name).unlink()
    shutil.rmtree(runs / "begun" / "checkpoints")
    shutil.rmtree(runs / "gone" / "checkpoints")
    (runs / "unchosen" / "choices.json").unlink()
    for manifest in (runs / "broken" / "checkpoints").glob("step-*/manifest.json"):
        manifest.write_text("{")
    (runs / "no-run").mkdir()
    (runs / "recipe.yaml").write_text("model: mine")  # a user's own, next to the runs
    return runs


def test_states(folder: Path) -> None:
    found = {str(run.path.relative_to(folder)): run for run in trimtab.runs(folder)}
    assert {name: run.state for name, run in found.items()} == {
        "done": "finished",
        "nested/stopped": "interrupted",
        "begun": "not begun",
        "gone": "damaged",
        "unchosen": "damaged",
        "broken": "damaged",
    }
    done, stopped = found["done"], found["nested/stopped"]
    assert (done.step, done.total_steps, done.checkpoint) == (6, 6, 6)
    assert (stopped.step, stopped.total_steps, stopped.checkpoint) == (5, 6, 4)
    assert done.loss is not None
    assert done.size_bytes == sum(p.stat().st_size for p in done.path.rglob("*") if p.is_file())
    assert (found["begun"].step, found["begun"].loss) == (0, None)
    problems = [found[name].problem or "" for name in ("gone", "unchosen", "broken")]
    assert ["missing" in problems[0], "choices.json" in problems[1], "damaged" in problems[2]] == [True] * 3


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (lambda _: {}, "lacks model_commit"),
        (lambda kept: {**kept, "version": None}, "has no valid version"),
        (lambda kept: {**kept, "version": True}, "has no valid version"),
        (lambda kept: {**kept, "recipe": None, "threads": "x"}, "has no valid recipe and threads"),
    ],
)
def test_a_damaged_choices_json(
    world: World, tmp_path: Path, cli: Call, change: Callable[[dict], dict], wrong: str
) -> None:
    run = shutil.copytree(world.run, tmp_path / "run")
    (run / "choices.json").write_text(json.dumps(change(json.loads((run / "choices.json").read_text()))))
    (listed,) = trimtab.runs(run)
    assert (listed.state, (listed.problem or "").startswith(f"choices.json {wrong}")) == ("damaged", True)
    cli("train", "--resume", run, "max_steps=8").refused(
        5, f"choices.json {wrong}", "restore the file from a copy"
    )


def test_a_choices_json_without_a_recipe_cannot_be_opened(world: World, tmp_path: Path, cli: Call) -> None:
    run = shutil.copytree(world.run, tmp_path / "run")
    (run / "choices.json").write_text("{}")
    cli("generate", run, "the cat").refused(5, "choices.json lacks recipe", "restore the file from a copy")


def test_the_end_of_a_run_is_read_from_its_metrics(folder: Path) -> None:
    """By its last records: records before a later training record are ignored."""
    run, log = folder / "done", folder / "done" / "metrics.jsonl"
    whole = log.read_text()

    def state(*events: str) -> str:
        rows = [json.dumps({"kind": "event", "step": 6, "message": event}) + "\n" for event in events]
        log.write_text(whole + "".join(rows))
        return trimtab.runs(run)[0].state

    assert state("more steps: 6 became 12") == "finished"
    assert state("stopped early at step 6 of 30: no better loss") == "stopped early"
    assert state("stopped by a callback: enough") == "stopped"
    assert state("not finite at step 7: layer 0") == "failed"
    early = json.dumps({"kind": "event", "step": 3, "message": "stopped early at step 3 of 30: x"}) + "\n"
    log.write_text(early + whole)
    assert trimtab.runs(run)[0].state == "finished"


def test_early_stopped_and_extended_runs(job: Callable[..., Path], cli: Call, tmp_path: Path) -> None:
    stopping = {
        "eval_steps": 1,
        "early_stopping_patience": 1,
        "early_stopping_threshold": 100,
        "max_steps": 30,
    }
    assert cli("train", job(output_dir=str(tmp_path / "early"), data_eval_share=0.3, **stopping)).code == 0
    (early,) = trimtab.runs(tmp_path / "early")
    assert early.state == "stopped early"
    assert early.step < (early.total_steps or 0) == 30
    constant = {"lr_scheduler_type": "constant", "output_dir": str(tmp_path / "longer")}
    assert cli("train", job(**constant)).code == 0
    plan = json.loads((tmp_path / "longer" / "plan.json").read_text())
    plan["data"]["steps"] = 4  # as a resume with max_steps=4 writes it, killed before its first step
    (tmp_path / "longer" / "plan.json").write_text(json.dumps(plan))
    assert trimtab.runs(tmp_path / "longer")[0].state == "interrupted"


def test_records_of_many_documents_do_not_hide_the_last_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trimtab.run.listing.TAIL_BYTES", 10)
    (done,) = trimtab.runs(folder / "done")
    assert (done.state, done.step) == ("finished", 6)
    assert done.loss is not None


def test_a_locked_run_is_running_and_listing_does_not_disturb_it(folder: Path) -> None:
    lock = folder / "done" / ".lock"
    with RunLock(folder / "done"):
        holder = lock.read_text()
        assert is_locked(lock)
        assert trimtab.runs(folder / "done")[0].state == "running"
        assert lock.read_text() == holder
    assert not is_locked(lock)
    assert trimtab.runs(folder / "done")[0].state == "finished"
    assert not is_locked(folder / "absent")
    assert not (folder / "absent").exists()


@pytest.mark.parametrize("name", ["done", "nested/stopped"])
@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (
            lambda log, rows: log.write_text("".join(rows[:3])),
            "metrics.jsonl is damaged: it ends after step 2",
        ),
        (
            lambda log, rows: log.write_bytes(bytes(range(256))),
            "metrics.jsonl is damaged: it ends after step 0",
        ),
        (lambda log, rows: (log.unlink(), log.mkdir()), "metrics.jsonl is a folder"),
        (lambda log, rows: log.unlink(), "metrics.jsonl is missing"),
    ],
)
def test_damaged_metrics_are_marked_and_the_loss_is_not_shown(
    folder: Path,
    cli: Call,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    damage: Callable[[Path, list[str]], object],
    problem: str,
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    log = folder / name / "metrics.jsonl"
    rows = log.read_text().splitlines(keepends=True)
    train = [row for row in rows if json.loads(row)["kind"] == "train"]
    damage(log, [rows[0], *train])
    (run,) = trimtab.runs(folder / name)
    step, state = (6, "finished") if name == "done" else (4, "interrupted")
    assert (run.state, run.step, run.loss, run.problem) == (state, step, None, problem)
    assert f"{state}: {problem}" in cli("runs", folder / name).out


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("x" * 6000, "too long for a file name"),
        ("a\0b", "NUL"),
        ("~no-such-user/x", "this machine has no such user"),
        ("", "is empty"),
    ],
)
def test_an_invalid_path(name: str, part: str) -> None:
    with pytest.raises(trimtab.TrimtabError, match=f"^folder .*{part}"):
        trimtab.runs(name)


def test_reading_a_run_does_not_change_its_age(folder: Path, cli: Call) -> None:
    run = folder / "done"
    for path in folder.rglob("*"):
        os.utime(path, (1e9, 1e9))
    assert cli("generate", run, "the cat", "--max-new-tokens", 1).code == 0
    assert cli("report", run).code == 0
    assert cli("export", "hf", run, folder / "exported").code == 0
    assert [run.updated for run in trimtab.runs(run)] == [1e9]
    (run / "metrics.jsonl").touch()
    assert trimtab.runs(run)[0].updated > 1e9


def test_the_table_and_json(folder: Path, cli: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    result = cli("runs", folder)
    assert result.code == 0, result.err
    lines = {line.split()[0]: line for line in result.out.splitlines() if line.strip()}
    assert "finished" in lines["done"]
    assert "6 / 6" in lines["done"]
    assert "5 / 6" in lines["nested/stopped"]
    assert "0 / ?" in lines["begun"]
    rows = [json.loads(line) for line in cli("runs", folder, "--json").out.splitlines()]
    assert rows == [run.to_dict() for run in trimtab.runs(folder)]
    monkeypatch.chdir(folder.parent)
    assert [line.split()[:2] for line in cli("runs").out.splitlines()] == [
        line.split()[:2] for line in result.out.splitlines()
    ]
    monkeypatch.setenv("HOME", str(folder.parent))
    again = cli("runs", "~/runs").out.splitlines()
    assert [line.split()[:4] for line in again] == [line.split()[:4] for line in result.out.splitlines()]
    assert cli("runs", folder / "no-run").out == f"no runs in {folder / 'no-run'}\n"
    cli("runs", folder / "absent").refused(5, "does not exist", "run folder")


def test_listing_imports_no_torch(folder: Path) -> None:
    code = "import sys, trimtab; assert trimtab.runs(sys.argv[1]); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, timeout=60)
