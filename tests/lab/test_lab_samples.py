"""Samples of repeated runs: statistics, records, the budget, and the limits of the timed part."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trimtab.facts.errors import DataError
from trimtab.lab import timing
from trimtab.lab.samples import Samples
from trimtab.lab.timing import Run, time_samples


def test_statistics_are_those_of_the_times() -> None:
    found = Samples((4.0, 1.0, 2.0, 3.0, 10.0))
    assert (found.mean_ms, found.median_ms, found.repetitions) == (4.0, 3.0, 5)
    assert found.std_ms == pytest.approx(3.5355, abs=1e-4)
    assert (found.low_ms, found.high_ms) == (1.0, 10.0)
    assert found.spread == pytest.approx(3.0)
    assert Samples((7.0,)).std_ms == Samples((7.0,)).spread == 0.0
    with pytest.raises(AssertionError):
        Samples(())


def test_a_record_has_every_time_and_is_read_back() -> None:
    found = Samples((1.000049, 2.0))
    record = found.to_dict()
    assert record["times_ms"] == [1.0, 2.0]
    assert Samples.from_dict(record) == Samples((1.0, 2.0))
    for damaged in ({}, {"times_ms": []}, {"times_ms": ["fast"]}, {"times_ms": None}):
        with pytest.raises(DataError, match="damaged"):
            Samples.from_dict(damaged)


def test_preparation_is_not_timed() -> None:
    calls = {"prepare": 0, "run": 0}

    def run() -> None:
        calls["run"] += 1

    def prepare() -> Run:
        calls["prepare"] += 1
        time.sleep(0.01)
        return run

    found = time_samples(prepare, device="cpu", repetitions=5, warm_up=2)
    assert found.median_ms < 5
    assert calls == {"prepare": 7, "run": 7}


def test_the_budget_ends_the_repetitions_and_one_is_always_made() -> None:
    now = iter(range(1000))
    found = time_samples(
        lambda: lambda: None, device="cpu", budget_ms=5000, warm_up=1, clock=lambda: next(now)
    )
    assert 1 < found.repetitions < 10, "the clock ticks a second each time it is read"
    assert time_samples(lambda: lambda: None, device="cpu", budget_ms=0, warm_up=3).repetitions == 1


class FakeGpu:
    """A fake device with a clock: launched runs take known times, and their order is recorded."""

    def __init__(self) -> None:
        self.now_ms, self.log = 0.0, []
        owner = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = owner.now_ms
                owner.log.append("event")

            def elapsed_time(self, other: Any) -> float:
                return other.at - self.at

        self.cuda = SimpleNamespace(
            Event=Event,
            synchronize=lambda: self.log.append("synchronize"),
            _sleep=lambda cycles: self.work("sleep", 3.0),
        )
        self.int8 = torch.int8

    def empty(self, count: int, dtype: torch.dtype, device: str) -> Any:
        assert (count, dtype, device) == (timing.CLEARED_BYTES, torch.int8, "cuda")
        return SimpleNamespace(zero_=lambda: self.work("clear", 5.0))

    def work(self, name: str, ms: float) -> None:
        self.now_ms += ms
        self.log.append(name)


def test_on_a_gpu_only_the_run_is_between_the_events(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    monkeypatch.setattr(timing, "torch", gpu)

    def prepare() -> Run:
        gpu.work("forward", 7.0)
        return lambda: gpu.work("backward", 11.0)

    found = time_samples(prepare, device="cuda", repetitions=4, warm_up=1)
    assert found == Samples((11.0,) * 4)
    assert gpu.log[:3] == ["forward", "synchronize", "backward"], "the warm-up"
    once = ["forward", "synchronize", "clear", "sleep", "event", "backward", "event", "synchronize"]
    assert gpu.log[3:] == once * 4


@pytest.mark.gpu
@pytest.mark.alone
def test_times_of_a_gpu_have_no_preparation() -> None:
    x = torch.empty(2**26, dtype=torch.int8, device="cuda")

    def copies(before: int) -> Samples:
        def prepare() -> Run:
            for _ in range(before):
                x.clone()
            return x.clone

        return time_samples(prepare, device="cuda", repetitions=20)

    plain, prepared = copies(0), copies(20)
    assert prepared.median_ms == pytest.approx(plain.median_ms, rel=0.3)
