"""Time and memory of things that run on a CUDA device, and the device's own ceilings.

Contestants are timed together: in every round each has its turn, so that a clock that drifts meets all of
them. Before each run a buffer larger than the L2 cache is written, so that inputs come from memory (there is
no need to rotate them), and the device is kept waiting for as long as the host takes to launch the run. So the
times are the device's own, as in a training step whose host runs ahead; the host's are given beside them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

Run = Callable[[], object]

CLEARED_BYTES = 256 * 2**20
"""More than any L2 cache (50 MiB on an H200, 96 MiB on an RTX 5090)."""


CYCLES_PER_MS = 2_000_000
LONGEST_WAIT_MS = 2.0
"""A run that waits for the device itself would have it wait as long again."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds of a run: the median over all rounds, the 10th and 90th percentile, how many runs."""

    median_ms: float
    low_ms: float
    high_ms: float
    runs: int
    host_ms: float = 0.0
    """What the host takes to launch a run; more than `median_ms` and a short program waits for it."""


@dataclass(frozen=True)
class Ceilings:
    """What the device was measured to do: bytes a second of a copy (read + written), FLOPs of a product."""

    copy_bytes_per_s: float
    matmul_flops_per_s: float
    device: str
    capability: int
    matmul_dtype: str


def summary(times_ms: list[float], host_ms: float = 0.0) -> Timing:
    """Median and spread of single runs.

    Example:
        >>> summary([1.0, 2.0, 9.0, 2.0, 3.0])
        Timing(median_ms=2.0, low_ms=1.0, high_ms=9.0, runs=5, host_ms=0.0)
    """
    ordered = sorted(times_ms)
    last = len(ordered) - 1
    low, high = ordered[round(0.1 * last)], ordered[round(0.9 * last)]
    return Timing(statistics.median(ordered), low, high, len(ordered), host_ms)


def time_together(
    contestants: dict[str, Run], *, rounds: int = 5, budget_ms: float = 100
) -> dict[str, Timing]:
    """Each contestant's time, measured in turns.

    Args:
        contestants: what to run, by name; nothing is done with what they return.
        rounds: how often everyone has a turn.
        budget_ms: device time of one contestant over all rounds; at least one run a round.

    Example:
        >>> x = torch.randn(4096, 4096, device="cuda")                                     # doctest: +SKIP
        >>> time_together({"eager": lambda: x.relu(), "in place": lambda: x.relu_()})      # doctest: +SKIP
    """
    buffer = torch.empty(CLEARED_BYTES, dtype=torch.int8, device="cuda")
    turns, waits, host_ms = {}, {}, {}
    for name, run in contestants.items():
        for _ in range(2):  # compilers and allocators have their say here
            run()
        host_ms[name] = _host_ms(run)
        waits[name] = round(min(1.5 * host_ms[name], LONGEST_WAIT_MS) * CYCLES_PER_MS)
        once = statistics.median(_timed(run, buffer, waits[name], 3))
        turns[name] = max(1, min(200, round(budget_ms / rounds / max(once, 1e-3))))
    times: dict[str, list[float]] = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            times[name] += _timed(contestants[name], buffer, waits[name], turns[name])
    return {name: summary(values, host_ms[name]) for name, values in times.items()}


def _host_ms(run: Run) -> float:
    """Until a run returns, its work still going on: the median of five."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def _timed(run: Run, buffer: torch.Tensor, wait: int, count: int) -> list[float]:
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)
    ]
    torch.cuda.synchronize()
    for start, stop in events:
        buffer.zero_()
        torch.cuda._sleep(wait)
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) for start, stop in events]


def peak_bytes(run: Run) -> int:
    """The most bytes of torch's allocator in use during a run, above those in use before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = run()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    del result
    return peak - before


def ceilings() -> Ceilings:
    """Measures this device: a copy of up to 1 GiB, a product of random square matrices. A second at most."""
    free, _ = torch.cuda.mem_get_info()
    count = min(2**30, free // 8)
    source = torch.empty(count, dtype=torch.int8, device="cuda").random_()
    target = torch.empty_like(source)
    # 16 bits that the chip multiplies in hardware; random numbers, since zeros draw less power and run faster
    major, minor = torch.cuda.get_device_capability()
    dtype = torch.bfloat16 if (major, minor) >= (8, 0) else torch.float16
    size = 8192 if free > 2 * 2**30 else 4096
    a = torch.randn(size, size, device="cuda", dtype=dtype)
    b = torch.randn(size, size, device="cuda", dtype=dtype)
    out = torch.empty_like(a)
    times = time_together(
        {"copy": lambda: target.copy_(source), "matmul": lambda: torch.mm(a, b, out=out)}, budget_ms=50
    )
    return Ceilings(
        copy_bytes_per_s=2 * count / times["copy"].median_ms * 1e3,
        matmul_flops_per_s=2 * size**3 / times["matmul"].median_ms * 1e3,
        device=torch.cuda.get_device_name(),
        capability=10 * major + minor,
        matmul_dtype=str(dtype).removeprefix("torch."),
    )
