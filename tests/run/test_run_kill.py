"""Killed at random instants and resumed, a run's losses are bit-identical to the uninterrupted run's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from run_kill import DRIVER, drive, losses
from tiny_model import write_recipe


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    drive(write_recipe(folder), 0, 0, signal.SIGKILL, 1.0)
    return folder


@pytest.mark.slow
def test_killed_at_random_instants(whole: Path, tmp_path: Path) -> None:
    recipe = write_recipe(whole, output_dir=str(tmp_path / "run"), save_steps=1)
    result = drive(recipe, 30, 1, signal.SIGKILL, 0.4)
    assert result["killed"] >= 15
    assert losses(tmp_path / "run") == losses(whole / "run")


@pytest.mark.slow
def test_terminated_at_random_instants(whole: Path, tmp_path: Path) -> None:
    recipe = write_recipe(whole, output_dir=str(tmp_path / "run"))
    result = drive(recipe, 6, 2, signal.SIGTERM, 0.5)
    assert result["graceful"] + result["killed"] >= 3
    assert losses(tmp_path / "run") == losses(whole / "run")


def test_a_start_killed_at_any_file_operation_can_be_restarted_by_train_and_by_resume(tmp_path: Path) -> None:
    """Every fifth of them; `make kills` tries every other one."""
    recipe = write_recipe(tmp_path, num_train_epochs=None, max_steps=2, eval_steps=None, eval_on_start=False)
    command = [sys.executable, str(DRIVER.with_name("kill_starts.py")), str(recipe), "5"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["failures"] == []
    assert result["kills"] >= 5
