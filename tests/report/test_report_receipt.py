"""Predicted and measured values in lines and in the report page."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trimtab.report import read_run
from trimtab.report.page import render
from trimtab.report.receipt import receipt_lines, receipt_rows

MakeRun = Callable[..., Path]
GIB = 2**30


def entry(**changes: Any) -> dict[str, Any]:
    predicted = {
        "allocated": round(7.92 * GIB),
        "process": 9 * GIB,
        "host": 2 * GIB,
        "step_seconds": 0.231,
        "evaluation_seconds": 2.0,
        "checkpoint_seconds": None,
    }
    measured = {
        "allocated": round(7.90 * GIB),
        "reserved": 8 * GIB,
        "process": None,
        "host": 2 * GIB,
        "step_seconds": {"median": 0.238, "low": 0.236, "high": 0.25, "count": 90},
        "evaluation_seconds": {"median": 2.5, "low": 2.4, "high": 2.6, "count": 3},
        "checkpoint_seconds": {"median": 61.0, "low": 60.0, "high": 62.0, "count": 2},
        "warm": True,
    }
    return {"predicted": predicted, "measured": measured, "device": {"kind": "cuda"}, **changes}


def test_a_line_for_memory_and_one_for_time() -> None:
    assert receipt_lines(entry()) == [
        "memory: predicted 7.92 GiB, measured 7.90 GiB (−0.3 %)",
        "step time: predicted 231 ms, measured 238 ms (+3.0 %)",
    ]


def test_unknown_values_are_reported_as_unknown() -> None:
    lines = receipt_lines(entry(predicted={"allocated": GIB, "step_seconds": None}))
    assert lines[1] == "step time: measured 238 ms, not predicted"
    assert receipt_lines(entry(measured={})) == []


def with_receipt(run: Path, *starts: dict[str, Any]) -> Path:
    (run / "receipts").mkdir()
    text = json.dumps({"version": 1, "starts": list(starts)})
    (run / "receipts" / "plan.json").write_text(text)
    return run


def test_the_page_has_a_table_of_the_last_start(make_run: MakeRun) -> None:
    older = entry(predicted={"allocated": 3}, measured={"allocated": 4})
    data = read_run(with_receipt(make_run([]), older, entry()))
    rows = {row.name: (row.predicted, row.measured, row.difference) for row in receipt_rows(data)}
    assert rows == {
        "peak memory of tensors in a step": ("7.92 GiB", "7.90 GiB", "−0.3 %"),
        "memory reserved by PyTorch's allocator": ("not predicted", "8.00 GiB", ""),
        "host memory of the process": ("2.00 GiB", "2.00 GiB", "+0.0 %"),
        "optimizer step": ("231 ms", "238 ms", "+3.0 %"),
        "evaluation": ("2.00 s", "2.50 s", "+25.0 %"),
        "checkpoint": ("not predicted", "1 min 01 s", ""),
    }
    page = render(data)
    assert "predicted and measured" in page
    for cells in rows.values():
        assert all(cell in page for cell in cells[:2])


def test_a_run_without_a_receipt_has_no_table(make_run: MakeRun) -> None:
    data = read_run(make_run([]))
    assert receipt_rows(data) == []
    assert 'id="receipt"' not in render(data)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"version": 2, "starts": []}', '{"version": 1, "starts": [7]}', '{"version": 1}'],
)
def test_a_damaged_or_newer_receipt_is_ignored(make_run: MakeRun, text: str) -> None:
    run = make_run([])
    (run / "receipts").mkdir()
    (run / "receipts" / "plan.json").write_text(text)
    data = read_run(run)
    assert data.starts == []
    assert render(data)


@pytest.mark.parametrize("value", ["<script>", float("inf"), [1], {"median": 1.0}])
def test_invalid_numbers_are_not_shown(make_run: MakeRun, value: Any) -> None:
    bad = entry()
    bad["measured"]["allocated"] = value
    data = read_run(with_receipt(make_run([]), bad))
    assert data.starts == []
