"""The process that measures a cell: a new one for fresh cells, the calling one for a study that only counts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import trimtab
from trimtab.lab import sweep
from trimtab.lab.study import FRESH, Cell, CellOutcome, Study
from trimtab.lab.sweep import run_sweep


def process_id(settings: dict[str, Any]) -> dict[str, Any]:
    """A study's `measure`."""
    return {"pid": os.getpid()}


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> Study:
        return Study(name, name, lambda m: [], f"{__name__}:process_id", in_process=name == "counting")

    here = str(Path(__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.setattr(sweep, "find_study", find)


def test_a_fresh_cell_has_a_process_in_which_nothing_ran(study: None, tmp_path: Path) -> None:
    cells = [Cell("timing", {"n": 0}), Cell("timing", {"n": 1}), Cell("timing", {"n": 2, FRESH: True})]
    first, second, fresh = (m.result["pid"] for m in run_sweep(cells, tmp_path, device="cpu"))
    assert first == second != fresh
    assert os.getpid() not in (first, fresh)


def test_a_study_that_counts_starts_no_process(study: None, tmp_path: Path) -> None:
    (measurement,) = run_sweep([Cell("counting", {})], tmp_path, device="cpu")
    assert measurement.outcome is CellOutcome.MEASURED
    assert measurement.result == {"pid": os.getpid()}
    assert measurement.machine.versions["trimtab"] == trimtab.__version__
