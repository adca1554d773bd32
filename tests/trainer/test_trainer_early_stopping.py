"""Early stopping: which evaluation ends a run, what is saved, and the same step after a resume."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tiny_setup import TinyLoader, tiny_setup

from trimtab.trainer import Cadence, Outcome, TrainingSetup, TrainState, train
from trimtab.trainer.early_stopping import EarlyStopping

SCORES = [3.0, 2.0, 2.1, 1.9, 1.95, 1.92, 1.91, 1.0, 1.5]
"""Of the evaluations at steps 0, 1, 2, …: the run stops before it reaches the 1.0."""


def stopping_setup(
    patience: int | None, threshold: float = 0.0, scores: list[float] = SCORES, **more: Any
) -> TrainingSetup:
    def evaluate(step: int) -> list[dict[str, Any]]:
        return [{"kind": "eval", "step": step, "name": "domain", "loss": scores[step]}]

    def at_end(step: int) -> list[dict[str, Any]]:
        return [{"kind": "sample", "step": step}]

    return tiny_setup(
        TinyLoader(),
        cadence=Cadence(total_steps=len(scores) - 1, eval_steps=1),
        evaluate=evaluate,
        evaluate_end=at_end,
        best_of="domain",
        early_stopping=None if patience is None else EarlyStopping(patience, threshold),
        **more,
    )


def of_kind(setup: TrainingSetup, kind: str) -> list[dict[str, Any]]:
    return [record for record in setup.log.records if record["kind"] == kind]  # type: ignore[attr-defined]


def resumed(stopped: TrainingSetup, step: int, patience: int | None) -> tuple[TrainingSetup, Outcome]:
    """Resumes a run from a checkpoint in a new setup."""
    tensors, scalars, _ = stopped.store.saved[step]  # type: ignore[attr-defined]
    setup = stopping_setup(patience)
    for name, tensor in setup.tensors().items():
        tensor.copy_(tensors[name])
    setup.loader.restore(scalars["loader"])
    setup.optimizer.restore_scalars(scalars["optimizer"])
    return setup, train(setup, TrainState(**scalars["state"]))


@pytest.mark.parametrize(
    ("patience", "threshold", "last"),
    [(1, 0.0, 2), (2, 0.0, 5), (3, 0.0, 6), (4, 0.0, 8), (2, 0.15, 3), (None, 0.0, 8)],
)
def test_the_evaluation_that_ends_a_run(patience: int | None, threshold: float, last: int) -> None:
    setup = stopping_setup(patience, threshold)
    outcome = train(setup, TrainState())
    assert (outcome.status, outcome.state.step) == ("finished", last)
    assert (outcome.reason is not None) == (last < 8)
    assert max(setup.store.saved) == last, "the state is saved where the run ends"  # type: ignore[attr-defined]


def test_records_of_a_run_that_stopped_early() -> None:
    setup = stopping_setup(3)
    outcome = train(setup, TrainState())
    reason = "3 evaluations in a row did not lower the domain loss (lowest: 1.9000), and early_stopping_patience is 3"
    assert outcome.reason == reason
    assert of_kind(setup, "event") == [
        {"kind": "event", "step": 6, "message": f"stopped early at step 6 of 8: {reason}"}
    ]
    assert of_kind(setup, "sample") == [{"kind": "sample", "step": 6}], "the end is measured as any end is"
    tagged = {step: tags for step, (_, _, tags) in setup.store.saved.items()}  # type: ignore[attr-defined]
    assert [step for step, tags in tagged.items() if tags] == [1, 3], "the best stays the best"


def test_nan_is_no_improvement() -> None:
    setup = stopping_setup(2, scores=[3.0, math.nan, math.nan, 1.0])
    assert train(setup, TrainState()).state.step == 2


def test_a_slow_descent_below_the_threshold_counts_as_none_and_may_still_be_the_best() -> None:
    setup = stopping_setup(2, 0.5, scores=[3.0, 2.9, 2.8, 1.0])
    outcome = train(setup, TrainState())
    assert (outcome.state.step, outcome.state.best) == (2, 2.8)
    assert setup.store.saved[2][2] == {"best"}  # type: ignore[attr-defined]
    assert "did not lower the domain loss by more than 0.5" in str(outcome.reason)


@pytest.mark.parametrize("step", [1, 3])
def test_a_run_resumed_in_between_stops_at_the_same_step(step: int) -> None:
    whole = stopping_setup(3)
    train(whole, TrainState())
    again, outcome = resumed(whole, step, 3)
    assert outcome.state.step == 6
    for name, tensor in whole.tensors().items():
        assert torch.equal(tensor, again.tensors()[name]), name
    assert of_kind(again, "event") == of_kind(whole, "event")


def test_the_count_continues_from_an_interrupted_run() -> None:
    interrupted = stopping_setup(3)
    interrupted.cadence = Cadence(total_steps=8, eval_steps=1, save_steps=1)
    train(interrupted, TrainState())
    again, outcome = resumed(interrupted, 5, 3)  # two of the three are behind it
    assert outcome.state.step == 6
    assert len(of_kind(again, "eval")) == 1


def test_resuming_a_run_that_stopped_early_says_so_and_trains_no_further() -> None:
    class Watching:
        def __init__(self) -> None:
            self.events: list[str] = []

        def record(self, record: dict[str, Any]) -> None:
            self.events += [record["message"]] if record["kind"] == "event" else []

        def message(self, text: str) -> None: ...

    stopped, view = stopping_setup(3), Watching()
    train(stopped, TrainState())
    scalars = stopped.store.saved[6][1]  # type: ignore[attr-defined]
    setup = stopping_setup(3, observers=[view])
    outcome = train(setup, TrainState(**scalars["state"]))
    assert (outcome.status, outcome.state.step) == ("finished", 6)
    assert view.events == [
        f"stopped early at step 6: {outcome.reason}; to continue training, raise early_stopping_patience"
    ]
    assert of_kind(setup, "train") == of_kind(setup, "event") == of_kind(setup, "sample") == []
    assert setup.store.saved == {}  # type: ignore[attr-defined]


@pytest.mark.parametrize("patience", [4, None])
def test_another_patience_trains_on_as_if_the_run_had_never_stopped(patience: int | None) -> None:
    stopped = stopping_setup(3)
    train(stopped, TrainState())
    again, outcome = resumed(stopped, 6, patience)
    whole = stopping_setup(patience)
    assert train(whole, TrainState()).state.step == outcome.state.step == 8
    assert again.log.losses() == whole.log.losses()[6:]  # type: ignore[attr-defined]
    for name, tensor in whole.tensors().items():
        assert torch.equal(tensor, again.tensors()[name]), name


def test_a_failed_final_evaluation_is_repeated_when_the_run_is_resumed() -> None:
    def fails(step: int) -> list[dict[str, Any]]:
        raise RuntimeError("out of memory")

    failed = stopping_setup(3)
    failed.evaluate_end = fails
    with pytest.raises(RuntimeError, match="out of memory"):
        train(failed, TrainState())
    again, outcome = resumed(failed, 6, 3)
    assert outcome.state.step == 6
    assert of_kind(again, "sample") == [{"kind": "sample", "step": 6}]
    assert len(of_kind(again, "event")) == 1


def test_states_of_versions_without_early_stopping_are_read() -> None:
    assert TrainState(step=4, tokens=64, best=2.0, seconds=1.0, measured=4).stale == 0
