"""The suites: their cells, their time limit, and errors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from trimtab.cli.main import main
from trimtab.facts.devices import DeviceFacts
from trimtab.facts.errors import RecipeError
from trimtab.lab.cell_times import CellTimes, Speed
from trimtab.lab.studies.claims.cells import cells as claims
from trimtab.lab.studies.concurrency.cells import cells as concurrency
from trimtab.lab.studies.sizes.cells import cells
from trimtab.lab.studies.step.cells import cells as step
from trimtab.lab.suite import SIZES, suite_cells
from trimtab.lab.sweep import RECORDS, TimeLimit, run_sweep

GPU = 140 * 2**30


def test_the_study_covers_every_size_and_study_once() -> None:
    found = suite_cells("study", device="cuda", memory_bytes=GPU)
    assert len({cell.key for cell in found}) == len(found)
    assert {cell.study for cell in found} == {"sizes", "step", "kernels", "memory", "attention", "compile"}
    steps = [cell.settings for cell in found if cell.study == "step"]
    for precision in ("fp32", "bf16"):
        parts = {(one["size"], one["part"]) for one in steps if one["precision"] == precision}
        assert {(size, part) for size in SIZES for part in ("forward", "both", "full")} <= parts
    assert {one["size"] for one in steps if one["mode"] == "compiled"} == set(SIZES)
    assert {one["warm_up"] for one in steps if one.get("fresh")} == {0, 1, 2, 5}
    assert all(one["budget_s"] <= 2.0 for one in steps)
    plain = {(one["head_dim"], one["length"]) for one in _plain(found)}
    assert {(dim, length) for dim in (16, 32, 64, 128) for length in (256, 4096, 16384)} <= plain


def _plain(found: list) -> list:
    return [c.settings for c in found if c.study == "attention" and c.settings.get("backend") == "reference"]


def test_a_cpu_measures_less_and_full_measures_more() -> None:
    study, full = (suite_cells(name, device="cpu", memory_bytes=2**34) for name in ("study", "full"))
    assert len(study) < len(full)
    assert all(cell.settings.get("device", "cpu") == "cpu" for cell in study)


def test_an_unknown_suite_names_the_nearest() -> None:
    with pytest.raises(RecipeError, match="did you mean study"):
        suite_cells("studi", device="cpu", memory_bytes=GPU)


H200 = DeviceFacts("NVIDIA H200", "cuda", GPU, capability=(9, 0))


def limit(seconds: float) -> TimeLimit:
    return TimeLimit(seconds, CellTimes(Speed.of(H200)))


def test_no_cell_begins_after_the_limit_and_the_next_call_continues(tmp_path: Path) -> None:
    every = cells(["small", "medium"])
    assert run_sweep(every, tmp_path, device="cpu", limit=limit(0)) == []
    assert not (tmp_path / RECORDS).exists()
    run_sweep(every[:1], tmp_path, device="cpu")
    assert len(run_sweep(every, tmp_path, device="cpu", limit=limit(0))) == 1
    assert len(run_sweep(every, tmp_path, device="cpu", limit=limit(600))) == 2


def test_the_study_fits_into_fifty_minutes_of_an_h200_in_pieces_below_nine() -> None:
    times = CellTimes(Speed.of(H200))
    found = suite_cells("study", device="cuda", memory_bytes=GPU)
    assert 20 * 60 < times.total(found) < 50 * 60
    assert max(map(times.seconds, found)) < 9 * 60


def test_every_study_has_an_estimate(tmp_path: Path) -> None:
    times = CellTimes(Speed.of(DeviceFacts("a CPU", "cpu", 2**34, cores=8)))
    for cell in [*suite_cells("full", device="cpu", memory_bytes=2**34), *claims(), *concurrency()]:
        assert 0 < times.seconds(cell) < 24 * 3600, cell


def test_a_larger_model_and_a_slower_device_take_longer() -> None:
    small, large = step(
        device="cuda", sizes=["small", "2.7B"], contexts=[1024], parts=["full"], losses=["logits_sum"]
    )
    fast, slow = CellTimes(Speed.of(H200)), CellTimes(Speed.of(replace(H200, name="NVIDIA Some Card")))
    assert fast.seconds(small) < fast.seconds(large) < slow.seconds(large)


def test_the_cells_are_listed_and_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "sizes", "small", "medium", "--device", "cpu", "--out", str(tmp_path)]
    run_sweep(cells(["small"]), tmp_path, device="cpu")
    assert main([*words, "--list", "--minutes", "5"]) == 0
    shown = capsys.readouterr().out
    assert "   1  measured                  sizes small\n   2  about " in shown
    assert "\nsizes: 2 cells, 1 recorded, about " in shown
    assert "\nabout 1 command with --minutes 5\n" in shown
    assert main([*words, "--list", "--json"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["outcome"], first["estimated_seconds"]) == ("measured", None)
    assert (second["settings"], second["outcome"]) == ({"size": "medium"}, None)
    assert second["estimated_seconds"] is not None
    assert len((tmp_path / RECORDS).read_text().splitlines()) == 1


def test_the_cells_for_a_gpu_that_is_not_here_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--suite", "study", "--list", "--gpu", "h200", "--minutes", "9"]) == 0
    shown = capsys.readouterr().out
    cells_of_gpu = suite_cells("study", device="cuda", memory_bytes=GPU)
    assert f"together: {len(cells_of_gpu)} cells, about " in shown
    assert "compiled" in shown
    assert " commands with --minutes 9" in shown


def test_a_part_of_a_suite_has_no_report_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "sizes", "small", "medium", "--device", "cpu", "--out", str(tmp_path)]
    run_sweep(cells(["small"]), tmp_path, device="cpu")
    assert main([*words, "--minutes", "1e-9"]) == 0
    said = capsys.readouterr()
    assert "time limit reached with 1 of 2 cells remaining, about " in said.err
    assert "; repeat the command to continue" in said.err
    assert f"a report of the cells so far: trimtab bench report {tmp_path}" in said.err
    assert said.out == ""
    assert not (tmp_path / "report.md").exists()
    assert main([*words, "--minutes", "5"]) == 0
    assert (tmp_path / "report.md").exists()


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "no study given; name a study, or use --suite study"),
        (["--suite", "study", "--minutes", "0"], "--minutes 0 is not positive; give a number above 0"),
        (["--suite", "all"], "the suites are study and full"),
        (
            ["--suite", "study", "step"],
            "--suite measures several studies and is not followed by step; remove --suite",
        ),
        (["--minutes", "3", "step"], "--minutes before step belongs to --suite; write it after the study"),
        (
            ["--suite", "study", "--gpu", "h200"],
            "--gpu is only for --list: a study measures this machine; add --list",
        ),
        (["--suite", "study", "--list", "--gpu", "h2000"], "h2000"),
        (
            ["--at-once", "3", "step"],
            "--at-once before step belongs to --suite; step runs alone: remove --at-once",
        ),
        (["--at-once", "3", "claims"], "write it after the study: trimtab bench claims --at-once"),
        (["--suite", "study", "--at-once", "0"], "--at-once 0 is too small; use at least 1"),
        (["--list", "sizes"], "write it after the study: trimtab bench sizes --list"),
        (["step", "--minutes", "nan"], "--minutes nan is not positive; give a number above 0"),
        (
            ["step", "--budget", "inf"],
            "--budget inf is not a time to measure; give a number of seconds above 0",
        ),
    ],
)
def test_mistakes(words: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    assert part in capsys.readouterr().err
