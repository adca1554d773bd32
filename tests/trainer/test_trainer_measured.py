"""Measurements of a run: which steps count, and when they are reported."""

from __future__ import annotations

import time
from typing import Any

import pytest
from tiny_setup import TinyLoader, tiny_setup

from trimtab.facts.errors import DataError, OutOfMemory
from trimtab.facts.phases import RunPhase
from trimtab.trainer import Cadence, TrainState, train
from trimtab.trainer.measured import Measured, Stopwatch, TimeSpread

NOTHING = (0, 0)


def test_the_first_steps_do_not_count() -> None:
    watch = Stopwatch(0)
    watch.interval(9.0, 1, one_time=NOTHING)
    watch.interval(5.0, 1, one_time=NOTHING)
    assert not watch.warm
    early = watch.measured(2)
    assert early.step == TimeSpread(5.0, 5.0, 9.0, 2)
    assert not early.warm
    for seconds in (1.0, 1.2, 1.1):
        watch.interval(seconds, 1, one_time=NOTHING)
    measured = watch.measured(5)
    assert measured.warm
    assert measured.step == TimeSpread(1.1, 1.0, 1.2, 3)


@pytest.mark.parametrize("captures_and_programs", [(1, 0), (0, 1)])
def test_steps_with_a_capture_or_a_compilation_do_not_count(captures_and_programs: tuple[int, int]) -> None:
    watch = Stopwatch(0)
    watch.interval(1.0, 2, one_time=NOTHING)
    watch.interval(50.0, 1, one_time=captures_and_programs)
    assert not watch.warm
    watch.interval(4.0, 2, one_time=captures_and_programs)
    assert watch.measured(5).step == TimeSpread(2.0, 2.0, 2.0, 2)


def test_the_time_of_a_save_does_not_count_as_step_time() -> None:
    watch = Stopwatch(10)
    watch.interval(2.0, 2, one_time=NOTHING)
    watch.saved(3.0, written=False)
    watch.interval(5.0, 2, one_time=NOTHING)
    watch.saved(7.0, written=True)
    measured = watch.measured(14)
    assert measured.first_step == 10
    assert measured.step == TimeSpread(1.0, 1.0, 1.0, 2)
    assert measured.checkpoint == TimeSpread(7.0, 7.0, 7.0, 1)
    assert measured.checkpoint_stall is not None
    assert measured.checkpoint_stall.count == 2


def measure(**more: Any) -> list[Measured]:
    reported: list[Measured] = []
    train(tiny_setup(TinyLoader(), on_measured=reported.append, **more), TrainState())
    return reported


def test_a_run_reports_once_warm_and_at_its_end() -> None:
    reported = measure(cadence=Cadence(total_steps=8, eval_on_start=False))
    assert [measured.last_step for measured in reported] == [3, 8]
    assert all(measured.warm for measured in reported)
    assert reported[-1].step is not None
    assert reported[-1].step.count == 6
    assert reported[0].buckets is not None
    assert reported[0].allocated == sum(reported[0].buckets.values())
    assert reported[-1].checkpoint is not None


def test_a_run_that_is_too_short_reports_at_its_end() -> None:
    (reported,) = measure(total_steps=2)
    assert not reported.warm
    assert reported.last_step == 2
    assert reported.step is not None


def test_with_rare_logging_reports_wait_for_a_device_read() -> None:
    reported = measure(cadence=Cadence(total_steps=20, logging_steps=10, eval_on_start=False))
    assert [measured.last_step for measured in reported] == [10, 20]


def test_evaluations_are_measured_apart_from_steps() -> None:
    def evaluate(step: int) -> list[dict[str, Any]]:
        time.sleep(0.02)
        return []

    reported = measure(cadence=Cadence(total_steps=6, eval_steps=2), evaluate=evaluate)[-1]
    assert reported.evaluation is not None
    assert reported.evaluation.count == 4
    assert reported.evaluation.median >= 0.02
    assert reported.step is not None
    assert reported.step.median < 0.02


def test_a_run_that_fails_reports_its_measurements() -> None:
    reported: list[Measured] = []
    setup = tiny_setup(TinyLoader(vanish_step=5), on_measured=reported.append)
    with pytest.raises(DataError):
        train(setup, TrainState())
    assert reported[-1].last_step == 5


def test_measuring_changes_no_loss() -> None:
    plain, measured = tiny_setup(TinyLoader()), tiny_setup(TinyLoader(), on_measured=lambda _: None)
    train(plain, TrainState())
    train(measured, TrainState())
    assert plain.log.losses() == measured.log.losses()


def test_out_of_memory_is_raised_in_its_phase_and_the_state_before_is_saved() -> None:
    """The phases of a step, as the loop enters them; after an error, the state of the last complete step is saved."""
    entered: list[RunPhase] = []

    class Watch:
        def __init__(self, phase: RunPhase) -> None:
            self.phase = phase

        def __enter__(self) -> None:
            entered.append(self.phase)
            if self.phase is RunPhase.BACKWARD and entered.count(RunPhase.OPTIMIZER_STEP) == 3:
                raise OutOfMemory("no memory")

        def __exit__(self, *_: object) -> None:
            pass

    setup = tiny_setup(TinyLoader(), during=Watch)
    setup.microstep.during = Watch
    with pytest.raises(OutOfMemory):
        train(setup, TrainState())
    assert max(setup.store.saved) == 3
    assert entered[:4] == [RunPhase.DATA, RunPhase.FORWARD, RunPhase.FORWARD, RunPhase.BACKWARD]
    assert entered[-1] is RunPhase.CHECKPOINT
