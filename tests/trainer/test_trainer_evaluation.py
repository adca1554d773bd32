"""Evaluation in the loop: failed ones are repeated, records are written together, NaN is never the best."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from tiny_setup import TinyLoader, tiny_setup

from trimtab.trainer import Cadence, TrainingSetup, TrainState, train

Scores = dict[int, float]


def evaluated_setup(scores: Scores, fails_at: int | None = None, **cadence: Any) -> TrainingSetup:
    """Evaluations give these scores; one of them fails after its first record."""

    def evaluate(step: int) -> Iterator[dict[str, Any]]:
        yield {"kind": "eval", "step": step, "name": "domain", "loss": scores[step]}
        if step == fails_at:
            raise RuntimeError("out of memory")
        yield {"kind": "probe", "step": step}

    settings = Cadence(total_steps=4, **cadence)
    return tiny_setup(TinyLoader(), cadence=settings, evaluate=evaluate, best_of="domain")


def evaluations(setup: TrainingSetup) -> list[tuple[str, int]]:
    return [(r["kind"], r["step"]) for r in setup.log.records if r["kind"] in ("eval", "probe")]  # type: ignore[attr-defined]


def state_of_failed(failed: TrainingSetup, whole: TrainingSetup) -> TrainState:
    """Another setup filled from the last checkpoint of one that failed; the state it begins with."""
    step = max(failed.store.saved)  # type: ignore[attr-defined]
    tensors, scalars, _ = failed.store.saved[step]  # type: ignore[attr-defined]
    for name, tensor in whole.tensors().items():
        tensor.copy_(tensors[name])
    whole.loader.restore(scalars["loader"])
    return TrainState(**scalars["state"])


@pytest.mark.parametrize(("fails_at", "eval_steps"), [(4, 0), (4, 2), (2, 2)])
def test_a_failed_evaluation_is_repeated_when_the_run_resumes(fails_at: int, eval_steps: int) -> None:
    scores = {0: 3.0, 2: 2.0, 4: 1.0}
    failed = evaluated_setup(scores, fails_at, eval_steps=eval_steps)
    with pytest.raises(RuntimeError, match="out of memory"):
        train(failed, TrainState())
    assert ("eval", fails_at) not in evaluations(failed), "all records or none"
    resumed = evaluated_setup(scores, eval_steps=eval_steps)
    state = state_of_failed(failed, resumed)
    assert state.step == fails_at
    train(resumed, state)
    whole = evaluated_setup(scores, eval_steps=eval_steps)
    train(whole, TrainState())
    assert evaluations(failed) + evaluations(resumed) == evaluations(whole)
    assert resumed.store.saved[fails_at][2] == {"best"}  # type: ignore[attr-defined]
    again = evaluated_setup(scores, eval_steps=eval_steps)
    train(again, state_of_failed(resumed, again))
    assert evaluations(again) == [], "a finished evaluation is not repeated"


def test_a_score_that_is_no_number_is_never_the_best() -> None:
    setup = evaluated_setup({0: math.nan, 1: 2.0, 2: math.nan, 3: 1.5, 4: 1.8}, eval_steps=1)
    outcome = train(setup, TrainState())
    assert outcome.state.best == 1.5
    tagged = {step: tags for step, (_, _, tags) in setup.store.saved.items()}  # type: ignore[attr-defined]
    assert [step for step, tags in tagged.items() if tags] == [1, 3]
