"""TensorBoard and Weights & Biases through whole runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tiny_model import write_recipe
from whole_run import Silent, records, run

from trimtab import launch
from trimtab.facts.errors import MissingDependency
from trimtab.recipe import load


class Crash(Exception):
    pass


def crash_after(step: int) -> object:
    def after(done: int) -> None:
        if done == step:
            raise Crash

    return after


def test_tensorboard_shows_each_step_once_after_a_crash_and_resume(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    recipe = write_recipe(tmp_path, report_to=["tensorboard"], logging_steps=1, save_steps=2, eval_steps=4)
    with pytest.raises(Crash):
        launch.train(load(recipe), Silent(), after_step=crash_after(5))
    folder = tmp_path / "run"
    assert list((folder / "tensorboard").glob("events.*"))
    assert launch.resume(folder, [], Silent()).status == "finished"
    events = accumulator.EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    shown = [(event.step, event.value) for event in events.Scalars("train/loss")]
    logged = [(record["step"], record["loss"]) for record in records(folder, "train")]
    assert len(logged) > 5
    assert [step for step, _ in shown] == [step for step, _ in logged]
    assert [value for _, value in shown] == pytest.approx([value for _, value in logged])
    general = [record["step"] for record in records(folder, "eval") if record["name"] == "general"]
    assert [event.step for event in events.Scalars("eval/general/loss")] == general


def test_a_missing_tracker_raises_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingDependency, match=r"wandb") as caught:
        run(tmp_path, "run", report_to=["wandb"])
    assert "pip install 'trimtab[wandb]'" in str(caught.value)
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "cache").exists(), "nothing was tokenized for it"
