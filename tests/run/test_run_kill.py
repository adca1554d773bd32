"""Killed at random instants and resumed, a run repeats the unstopped run's losses bit by bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_model import write_recipe

DRIVER = Path(__file__).with_name("kill_driver.py")


def losses(folder: Path) -> dict[int, str]:
    """Step to loss, as the log has it; each step must be there once."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    train = [r for r in rows if r["kind"] == "train"]
    assert [r["step"] for r in train] == list(range(1, len(train) + 1))
    evals = [(r["step"], r["name"], r["loss"]) for r in rows if r["kind"] == "eval"]
    assert len(evals) == len(set(evals))
    return {r["step"]: float(r["loss"]).hex() for r in train} | {-i: str(e) for i, e in enumerate(evals, 1)}


def drive(recipe: Path, kills: int, seed: int, number: int, within: float) -> dict[str, int]:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "KILL_LOG": str(recipe.parent / "messages"),
        "KILL_WITHIN": str(within),
    }
    command = [sys.executable, str(DRIVER), str(recipe), str(kills), str(seed), str(number)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    drive(write_recipe(folder), 0, 0, signal.SIGKILL, 1.0)
    return folder


@pytest.mark.slow
def test_killed_at_random_instants(whole: Path, tmp_path: Path) -> None:
    recipe = write_recipe(whole, output_dir=str(tmp_path / "run"), save_steps=1)
    result = drive(recipe, 30, 1, signal.SIGKILL, 1.0)
    assert result["killed"] >= 15
    assert losses(tmp_path / "run") == losses(whole / "run")


@pytest.mark.slow
def test_terminated_at_random_instants(whole: Path, tmp_path: Path) -> None:
    recipe = write_recipe(whole, output_dir=str(tmp_path / "run"))
    result = drive(recipe, 6, 2, signal.SIGTERM, 1.5)
    assert result["graceful"] + result["killed"] >= 3
    assert losses(tmp_path / "run") == losses(whole / "run")
