"""Time of whole steps, synchronized, by two clocks: the host's and, on a CUDA GPU, the device's own.

A step is timed as a user would see it: the device is idle when it begins, and it ends when the device is idle again.
Caches are not cleared and launches are part of the time, unlike in `trimtab.lab.timing`, which times kernels. Events
are recorded on the device before the first and after the last kernel, so that the device's span can be compared with
the host's clock: the difference is the cost of launching the first kernel and of the final synchronization.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from trimtab.lab.samples import Samples
from trimtab.lab.step_times import LEAST_STEPS, StepTimes
from trimtab.lab.timing import Run


class StepClock(Protocol):
    """The clocks of a device. Tests use one with known delays."""

    def synchronize(self) -> None:
        """Waits until the device has finished."""

    def now(self) -> float:
        """Seconds of the host."""

    def mark(self) -> Any:
        """Records an event in the device's work; None on a CPU."""

    def span_ms(self, start: Any, stop: Any) -> float:
        """Milliseconds between two events, after synchronization."""


class HostClock:
    """A CPU: the host's clock is the only one."""

    def synchronize(self) -> None:
        """Does nothing: CPU operations are synchronous."""

    def now(self) -> float:
        """Seconds of the host."""
        return time.perf_counter()

    def mark(self) -> Any:
        """Returns no event."""
        return None

    def span_ms(self, start: Any, stop: Any) -> float:
        """Never called."""
        raise AssertionError("a CPU has no events")


class CudaClock:
    """A CUDA GPU: events on the current stream."""

    def synchronize(self) -> None:
        """Waits for all streams."""
        torch.cuda.synchronize()

    def now(self) -> float:
        """Seconds of the host."""
        return time.perf_counter()

    def mark(self) -> Any:
        """Records and returns an event."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def span_ms(self, start: Any, stop: Any) -> float:
        """Milliseconds between two recorded events."""
        return float(start.elapsed_time(stop))


def clock_of(device: str) -> StepClock:
    """The clocks of `cpu` or `cuda`.

    Example:
        >>> type(clock_of("cpu")).__name__
        'HostClock'
    """
    return CudaClock() if device.startswith("cuda") else HostClock()


def time_steps(
    prepare: Callable[[], Run],
    *,
    device: str,
    steps: int,
    warm_up: int,
    budget_s: float | None = None,
    clock: StepClock | None = None,
) -> StepTimes:
    """Times steps one by one; returns every time, with warm-up steps separate.

    Args:
        prepare: returns the step to time. It is called before each step, outside the timed part: for a backward pass
            it runs the forward pass.
        device: `cpu` or `cuda`.
        steps: the number of timed steps, at least one.
        warm_up: steps before them; with 0 the first timed step includes the process's one-time setup.
        budget_s: no further step begins after this many timed seconds, except for the first `LEAST_STEPS`; None for no
            limit. Half of it limits the warm-up in the same way, except for its first step.
        clock: the device's clock by default; tests pass another.

    Example:
        >>> x = torch.ones(4, requires_grad=True)
        >>> found = time_steps(lambda: (x * x).sum().backward, device="cpu", steps=3, warm_up=1)
        >>> found.host.repetitions, found.device, len(found.warm_up_ms)
        (3, None, 1)
    """
    assert steps >= 1, "at least one step is timed"
    assert warm_up >= 0, "a warm-up cannot be negative"
    clock = clock or clock_of(device)
    half = None if budget_s is None else budget_s / 2
    warm = _time_several(prepare, clock, warm_up, least=1, budget_s=half)
    timed = _time_several(prepare, clock, steps, least=LEAST_STEPS, budget_s=budget_s)
    spans = tuple(span for _, span in timed if span is not None)
    return StepTimes(
        host=Samples(tuple(host for host, _ in timed)),
        device=Samples(spans) if spans else None,
        warm_up_ms=tuple(host for host, _ in warm),
    )


def _time_several(
    prepare: Callable[[], Run], clock: StepClock, steps: int, *, least: int, budget_s: float | None
) -> list[tuple[float, float | None]]:
    """Times of several steps; after `budget_s` timed seconds only as many as `least`."""
    timed: list[tuple[float, float | None]] = []
    spent_ms = 0.0
    while len(timed) < steps:
        if budget_s is not None and spent_ms >= 1e3 * budget_s and len(timed) >= least:
            break
        timed.append(_time_one(prepare, clock))
        spent_ms += timed[-1][0]
    return timed


def _time_one(prepare: Callable[[], Run], clock: StepClock) -> tuple[float, float | None]:
    """(host milliseconds, milliseconds between the device's events) of one step."""
    run = prepare()
    clock.synchronize()
    start = clock.now()
    first = clock.mark()
    # The result is released after the clock has stopped: it may own a whole autograd graph.
    result = run()
    last = clock.mark()
    clock.synchronize()
    host = 1e3 * (clock.now() - start)
    del result
    return host, None if first is None else clock.span_ms(first, last)
