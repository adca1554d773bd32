"""Drives a run through kills, and reads its log afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

DRIVER = Path(__file__).with_name("kill_driver.py")


def losses(folder: Path) -> dict[int, str]:
    """Step → loss from the log; each step must be logged once."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    train = [r for r in rows if r["kind"] == "train"]
    assert [r["step"] for r in train] == list(range(1, len(train) + 1))
    evals = [(r["step"], r["name"], r["loss"], str(r["units"])) for r in rows if r["kind"] == "eval"]
    assert len(evals) == len(set(evals))
    return {r["step"]: float(r["loss"]).hex() for r in train} | {-i: str(e) for i, e in enumerate(evals, 1)}


def drive(recipe: Path, kills: int, seed: int, number: int, within: float) -> dict[str, float]:
    """The driver's counts, and the seconds of the last child; signals come up to `within` seconds after a start."""
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
