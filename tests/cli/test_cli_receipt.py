"""Predicted and measured values: printed by every run, saved in its folder, one entry for each start."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_world import Call, World

from trimtab.run.plan_receipt import PlanReceipt
from trimtab.trainer.measured import Measured

Job = Callable[..., Path]

MEMORY = re.compile(r"step +3  memory: predicted (\S+ \S+), measured \S+ \S+ \([+−]\d+\.\d %\), tensors only")
STEP = re.compile(r"step +3  step time: (predicted \S+ \S+, )?measured \S+ m?s")


def starts(run: Path) -> list[dict[str, Any]]:
    receipt = json.loads((run / "receipts" / "plan.json").read_text())
    assert receipt["version"] == 1
    found: list[dict[str, Any]] = receipt["starts"]
    return found


def test_a_run_prints_one_line_each_and_saves_the_receipt(world: World) -> None:
    assert len(MEMORY.findall(world.output)) == 1
    assert len(STEP.findall(world.output)) == 1
    (start,) = starts(world.run)
    assert (start["first_step"], start["last_step"]) == (1, 6)
    predicted, measured = start["predicted"], start["measured"]
    plan = json.loads((world.run / "plan.json").read_text())
    assert predicted["allocated"] == plan["memory"]["peak"]["total"]
    assert abs(measured["allocated"] / predicted["allocated"] - 1) < 0.02
    assert measured["step_seconds"]["count"] == 4  # the first two are not representative
    assert measured["warm"]
    assert measured["evaluation_seconds"]["count"] == 3
    assert measured["checkpoint_seconds"]["count"] >= 1
    assert measured["process"] > 100 * 2**20
    assert start["device"]["kind"] == "cpu"
    assert start["versions"]["torch"]
    assert start["basis"]["time"]


def test_each_start_has_its_entry(world: World, cli: Call, tmp_path: Path) -> None:
    run = shutil.copytree(world.run, tmp_path / "copy")
    result = cli("train", "--resume", run, "max_steps=10")
    assert result.code == 0
    assert "memory: predicted" in result.out
    first, second = starts(run)
    assert first == starts(world.run)[0]
    assert (second["first_step"], second["last_step"]) == (7, 10)
    assert second["started"] >= first["started"]


def test_a_damaged_receipt_does_not_stop_the_run(world: World, cli: Call, tmp_path: Path) -> None:
    run = shutil.copytree(world.run, tmp_path / "copy")
    (run / "receipts" / "plan.json").write_text('{"version": 1, "starts": [')
    assert "receipts/plan.json" in cli("report", run).out
    assert cli("train", "--resume", run, "max_steps=8").code == 0
    (only,) = starts(run)
    assert only["first_step"] == 7


def test_a_quiet_run_prints_none_and_saves_the_receipt(job: Job, cli: Call, tmp_path: Path) -> None:
    result = cli("train", job(max_steps=4), "--quiet")
    assert "predicted" not in result.out
    assert starts(tmp_path / "run")[0]["last_step"] == 4


def test_a_short_run_reports_that_its_first_steps_are_included(job: Job, cli: Call, tmp_path: Path) -> None:
    result = cli("train", job(max_steps=2))
    assert re.search(r"step +2  step time: .*measured .*, first steps included", result.out)
    assert not starts(tmp_path / "run")[0]["measured"]["warm"]


def test_an_unwritable_receipt_is_reported_and_training_continues(
    job: Job, cli: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = PlanReceipt.__call__

    def call(self: PlanReceipt, measured: Measured) -> None:
        (tmp_path / "run" / "receipts").write_text("a file where the folder should be")
        real(self, measured)

    monkeypatch.setattr(PlanReceipt, "__call__", call)
    result = cli("train", job(max_steps=4))
    assert result.code == 0
    assert "receipts/plan.json could not be written" in result.out
