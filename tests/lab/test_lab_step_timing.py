"""Timing of steps on a device with known delays gives the known answer; on a GPU the clocks agree."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import pytest

from trimtab.facts.errors import DataError
from trimtab.lab.profiles import profile_run
from trimtab.lab.samples import Samples
from trimtab.lab.step_settings import StepSettings, TimedPart
from trimtab.lab.step_times import StepTimes
from trimtab.lab.step_timing import time_steps
from trimtab.lab.study_step import StudyStep

LAUNCH, WAIT = 0.25, 0.5
"""Milliseconds that the host of the fake device takes to launch a kernel, and to return from a wait."""


class FakeDevice:
    """A simulated asynchronous device: it runs its kernels in order, while the host continues."""

    def __init__(self) -> None:
        self.host_ms = self.free_ms = 0.0
        self.waits = 0

    def launch(self, ms: float) -> None:
        self.host_ms += LAUNCH
        self.free_ms = max(self.free_ms, self.host_ms) + ms

    def synchronize(self) -> None:
        self.waits += 1
        self.host_ms = max(self.host_ms, self.free_ms) + WAIT

    def now(self) -> float:
        return self.host_ms / 1e3

    def mark(self) -> float:
        return max(self.free_ms, self.host_ms)

    def span_ms(self, start: float, stop: float) -> float:
        return stop - start


def kernels(device: FakeDevice, *times: float) -> Callable[[], None]:
    def run() -> None:
        for ms in times:
            device.launch(ms)

    return run


def test_known_delays_give_the_known_times() -> None:
    device = FakeDevice()
    lengths = iter([500.0, 100.0, 10.0, 12.0, 14.0])
    found = time_steps(
        lambda: kernels(device, next(lengths)), device="cuda", steps=3, warm_up=2, clock=device
    )
    assert found.device is not None
    assert found.device.times_ms == pytest.approx([LAUNCH + ms for ms in (10, 12, 14)])
    assert found.host.times_ms == pytest.approx([LAUNCH + ms + WAIT for ms in (10, 12, 14)])
    assert found.host.mean_ms == pytest.approx(12 + LAUNCH + WAIT)
    assert found.host.std_ms == pytest.approx(2.0)
    assert found.warm_up_ms == pytest.approx([500 + LAUNCH + WAIT, 100 + LAUNCH + WAIT])
    assert found.first_ms == pytest.approx(500 + LAUNCH + WAIT)
    assert found.clock_gap == pytest.approx(WAIT / (12 + LAUNCH))


def test_half_the_budget_limits_the_warm_up_except_for_its_first_step() -> None:
    device = FakeDevice()
    found = time_steps(
        lambda: kernels(device, 400.0), device="cuda", steps=10, warm_up=5, budget_s=1.5, clock=device
    )
    assert (len(found.warm_up_ms), found.host.repetitions) == (2, 4)
    found = time_steps(
        lambda: kernels(device, 9000.0), device="cuda", steps=10, warm_up=5, budget_s=1.5, clock=device
    )
    assert (len(found.warm_up_ms), found.host.repetitions) == (1, 2)
    found = time_steps(
        lambda: kernels(device, 10.0), device="cuda", steps=10, warm_up=5, budget_s=1.5, clock=device
    )
    assert (len(found.warm_up_ms), found.host.repetitions) == (5, 10)


def test_without_warm_up_the_first_step_is_among_the_timed_ones() -> None:
    device = FakeDevice()
    lengths = iter([500.0, 10.0, 10.0])
    found = time_steps(
        lambda: kernels(device, next(lengths)), device="cuda", steps=3, warm_up=0, clock=device
    )
    assert found.warm_up_ms == ()
    assert found.first_ms == found.host.times_ms[0] == pytest.approx(500 + LAUNCH + WAIT)
    assert found.host.mean_ms > 10 * found.host.median_ms


def test_a_backward_pass_is_timed_without_the_forward_pass_before_it() -> None:
    device = FakeDevice()

    def prepare() -> Callable[[], None]:
        kernels(device, 70.0, 30.0)()  # still running when prepare returns
        return kernels(device, 11.0)

    found = time_steps(prepare, device="cuda", steps=4, warm_up=1, clock=device)
    assert found.device is not None
    assert found.device.times_ms == pytest.approx([11 + LAUNCH] * 4)
    assert found.host.times_ms == pytest.approx([11 + LAUNCH + WAIT] * 4)


def test_timing_waits_for_the_end_of_a_step() -> None:
    """Launches alone take 0.75 ms of host time; a clock without synchronization would show that."""
    device = FakeDevice()
    found = time_steps(
        lambda: kernels(device, 40.0, 40.0, 40.0), device="cuda", steps=2, warm_up=0, clock=device
    )
    assert found.host.median_ms == pytest.approx(120 + LAUNCH + WAIT)
    assert device.waits == 4


def test_the_budget_ends_the_steps_and_leaves_two() -> None:
    for seconds, expected in ((0.35, 4), (0.001, 2), (None, 10)):
        device = FakeDevice()
        prepare = partial(kernels, device, 99.25)
        found = time_steps(prepare, device="cuda", steps=10, warm_up=0, budget_s=seconds, clock=device)
        assert found.host.repetitions == expected, seconds


def test_what_a_step_returns_outlives_its_time() -> None:
    device, released = FakeDevice(), []

    class Graph:
        def __del__(self) -> None:
            released.append(device.host_ms)
            device.host_ms += 1000

    found = time_steps(lambda: Graph, device="cuda", steps=2, warm_up=0, clock=device)
    assert len(released) == 2
    assert found.host.high_ms == pytest.approx(WAIT)


def test_a_cpu_has_one_clock_and_it_runs() -> None:
    found = time_steps(lambda: lambda: time.sleep(0.01), device="cpu", steps=2, warm_up=1)
    assert found.device is None
    assert found.clock_gap is None
    assert min(found.host.times_ms) >= 9.9


def test_records_of_times_are_read_back() -> None:
    times = StepTimes(Samples((2.0, 3.0)), Samples((1.5, 2.5)), (9.0,))
    assert StepTimes.from_dict(times.to_dict()) == times
    for damaged in (
        {},
        {"host": None, "device": None, "warm_up_ms": []},
        {**times.to_dict(), "warm_up_ms": 3},
    ):
        with pytest.raises(DataError, match="damaged"):
            StepTimes.from_dict(damaged)


@pytest.mark.gpu
@pytest.mark.alone
def test_on_a_gpu_host_clock_events_and_kernels_agree() -> None:
    step = StudyStep(StepSettings("medium", context=512, batch=4, device="cuda"))
    found = time_steps(step.prepared(TimedPart.FORWARD_BACKWARD), device="cuda", steps=10, warm_up=3)
    assert found.device is not None
    assert found.clock_gap == pytest.approx(0.0, abs=0.03)
    step.drop_gradients()
    span = 1e3 * profile_run(step.forward_backward, "cuda").span_seconds
    assert span == pytest.approx(found.host.median_ms, rel=0.03), "first kernel to last, by the profiler"
