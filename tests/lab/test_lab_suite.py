"""The suites: their cells, their time limit, and errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from trimtab.cli.main import main
from trimtab.facts.errors import RecipeError
from trimtab.lab.studies.sizes.cells import cells
from trimtab.lab.suite import SIZES, suite_cells
from trimtab.lab.sweep import RECORDS, run_sweep

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
    assert all(one["budget_s"] == 2.0 for one in steps)
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


def test_no_cell_begins_after_the_limit_and_the_next_call_continues(tmp_path: Path) -> None:
    every = cells(["small", "medium"])
    assert run_sweep(every, tmp_path, device="cpu", limit_seconds=0) == []
    assert not (tmp_path / RECORDS).exists()
    run_sweep(every[:1], tmp_path, device="cpu")
    assert len(run_sweep(every, tmp_path, device="cpu", limit_seconds=0)) == 1
    assert len(run_sweep(every, tmp_path, device="cpu", limit_seconds=600)) == 2


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ([], "no study given; name a study, or use --suite study"),
        (["--suite", "study", "--minutes", "0"], "--minutes 0 is not positive; give a number above 0"),
        (["--suite", "all"], "the suites are study and full"),
    ],
)
def test_mistakes(words: list[str], part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    assert part in capsys.readouterr().err
