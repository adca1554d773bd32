"""Results by item in a run's log: they agree with the totals, and a resumed run has the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_model import write_recipe, write_tiny_model

from trimtab.cli.main import main

MEASURED = ("eval", "probe", "answers")


def measured(run: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["kind"] in MEASURED]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of four steps, and one that was stopped after two and resumed."""
    folder = tmp_path_factory.mktemp("items")
    settings: dict[str, Any] = {
        "num_train_epochs": None,
        "lr_scheduler_type": "constant",
        "eval_steps": 2,
        "probe": True,
        "answers": 9,
    }
    write_tiny_model(folder / "model", max_positions=512)
    whole = write_recipe(folder, **settings, max_steps=4)
    assert main(["train", str(whole)]) == 0
    stopped = write_recipe(folder, **settings, max_steps=2, output_dir=str(folder / "stopped"))
    assert main(["train", str(stopped)]) == 0
    assert main(["train", "--resume", str(folder / "stopped"), "max_steps=4"]) == 0
    return folder / "run", folder / "stopped"


def test_results_by_item_agree_with_the_totals(runs: tuple[Path, Path]) -> None:
    rows = measured(runs[0])
    assert [(r["kind"], r["step"]) for r in rows if r["kind"] == "answers"] == [
        ("answers", 0),
        ("answers", 4),
    ]
    for row in rows:
        if row["kind"] == "eval":
            units = row["units"]
            assert (units["unit"], sum(units["tokens"])) == ("document", row["tokens"])
            mean = sum(v * n for v, n in zip(units["losses"], units["tokens"], strict=True)) / row["tokens"]
            assert mean == pytest.approx(row["loss"], rel=1e-5)
        elif row["kind"] == "probe":
            assert {kind: len(right) for kind, right in row["right"].items()} == row["items"]
            shares = {kind: right.count("1") / len(right) for kind, right in row["right"].items()}
            assert shares == row["scores"]
        else:
            assert len(row["right"]) == row["total"] == 9
            assert row["right"].count("1") == row["exact"]


def test_a_resumed_run_has_the_same_results_by_item(runs: tuple[Path, Path]) -> None:
    whole, resumed = (measured(run) for run in runs)
    # The run of two steps also answered at its own end.
    assert [r for r in resumed if (r["kind"], r["step"]) != ("answers", 2)] == whole
    assert len({str(r.get("units")) for r in whole if r.get("name") == "domain"}) == 3
