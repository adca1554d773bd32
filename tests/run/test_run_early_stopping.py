"""Early stopping in whole runs: what the run folder, the report and Python say, and a resume of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_model import write_recipe
from whole_run import Silent, losses, records

import trimtab
from trimtab import launch
from trimtab.checkpoint import Store
from trimtab.facts.errors import RecipeError
from trimtab.recipe import load
from trimtab.report import read_run, write_page

STOPS = {
    "learning_rate": 1.0,  # far too high: the loss rises from the first step on
    "num_train_epochs": 8,
    "eval_steps": 1,
    "early_stopping_patience": 3,
    "logging_steps": 1,
    "save_steps": 2,
    "prompts": ["the cat"],
}


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopped")
    return trimtab.train(str(write_recipe(folder, **STOPS))).folder


def test_the_run_folder_and_the_report_contain_the_reason(stopped: Path, tmp_path: Path) -> None:
    last = losses(stopped)[-1:] and records(stopped, "train")[-1]["step"]
    (event,) = records(stopped, "event")
    assert event["step"] == last
    assert event["message"].startswith(f"stopped early at step {last} of ")
    assert "did not lower the domain loss (lowest: " in event["message"]
    write_page(read_run(stopped), tmp_path / "report.html")
    assert "stopped early at step" in (tmp_path / "report.html").read_text()
    assert {r["step"] for r in records(stopped, "sample")} == {0, last}, "completions before and after"
    with Store(stopped / "checkpoints") as store:
        latest = store.latest()
        assert latest is not None
        assert latest.step == last


def test_a_resume_reports_the_early_stop_and_trains_nothing(stopped: Path) -> None:
    before = losses(stopped)
    result = trimtab.resume(stopped)
    assert (result.status, losses(stopped)) == ("finished", before)
    assert result.reason is not None
    assert result.reason.endswith("and early_stopping_patience is 3")
    assert len(records(stopped, "event")) == 1


def test_killed_and_resumed_it_stops_at_the_same_step(stopped: Path) -> None:
    class Stop(Exception):
        pass

    def stop(step: int) -> None:
        if step == 2:
            raise Stop

    folder = stopped.parent / "killed"
    path = write_recipe(stopped.parent, **STOPS, output_dir=str(folder))
    with pytest.raises(Stop):
        launch.train(load(path), Silent(), after_step=stop)
    finished = launch.resume(folder, [], Silent())
    assert finished.reason is not None
    assert losses(folder) == losses(stopped)
    assert records(folder, "event") == records(stopped, "event")


def test_more_steps_alone_do_not_continue_it(stopped: Path) -> None:
    path = write_recipe(stopped.parent, **STOPS, output_dir=str(stopped.parent / "extended"))
    finished = launch.train(load(path), Silent())
    before = (finished.folder / "recipe.yaml").read_text(), losses(finished.folder)
    with pytest.raises(RecipeError, match="early_stopping_patience: 3 ended the run"):
        launch.resume(finished.folder, ["max_steps=1000"], Silent())
    assert ((finished.folder / "recipe.yaml").read_text(), losses(finished.folder)) == before


def test_a_larger_patience_trains_on(stopped: Path) -> None:
    path = write_recipe(stopped.parent, **STOPS, output_dir=str(stopped.parent / "longer"))
    finished = launch.train(load(path), Silent())
    again = launch.resume(finished.folder, ["early_stopping_patience=5"], Silent())
    assert again.step == finished.step + 2
    assert losses(again.folder)[: finished.step] == losses(stopped)
