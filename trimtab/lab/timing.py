"""Time of functions on a CPU or a CUDA GPU, and the device's own peak rates.

Functions are timed in alternation: each runs in every round, so that a drifting clock affects all of them alike. On a
GPU a buffer larger than the L2 cache is written before each run, so that inputs come from memory, and the device waits
until the host has launched the run. Times are then those of the device alone, as in a training step whose host runs
ahead; host times are reported next to them. On a CPU caches are not cleared: there an operation usually reads what the
previous one has just written.

`time_together` compares functions; `time_samples` repeats one function, returns every time and lets each repetition
prepare its run outside the timed part, as a backward pass needs a forward pass before it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from trimtab.facts.devices import BF16_CAPABILITY
from trimtab.facts.dtypes import TORCH_NAMES
from trimtab.lab.samples import CacheState, Samples

Run = Callable[[], object]

CLEARED_BYTES = 256 * 2**20
"""More than any L2 cache (50 MiB on an H200, 96 MiB on an RTX 5090)."""
CYCLES_PER_MS = 2_000_000
LONGEST_WAIT_MS = 2.0
"""Maximum time that the GPU sleeps before a timed run so that the host can launch ahead. The host time of a run that
synchronizes contains the run itself; without this limit the sleep would grow with it."""
MOST_RUNS = 200
"""Maximum number of runs per round."""


@dataclass(frozen=True)
class Timing:
    """Milliseconds of a run: the median over all rounds, the 10th and 90th percentile, the number of runs."""

    median_ms: float
    low_ms: float
    high_ms: float
    runs: int
    host_ms: float = 0.0
    """Host time to launch a run; if it exceeds `median_ms`, the run is launch-bound unless other work is queued."""

    @property
    def seconds(self) -> float:
        """The median."""
        return self.median_ms / 1e3

    @property
    def spread(self) -> float:
        """From the 10th to the 90th percentile, as a share of the median.

        Example:
            >>> Timing(2.0, 1.9, 2.3, 9).spread
            0.2
        """
        return round((self.high_ms - self.low_ms) / max(self.median_ms, 1e-9), 6)


@dataclass(frozen=True)
class Ceilings:
    """Measured peak rates of a device: bytes per second of a copy (read + written), FLOP/s of a product."""

    copy_bytes_per_s: float
    matmul_flops_per_s: float
    device: str
    capability: int
    """10 · major + minor; 0 on a CPU."""
    matmul_dtype: str


def synchronize(device: str) -> None:
    """Waits until a CUDA device has finished; does nothing on a CPU."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def summary(times_ms: list[float], host_ms: float = 0.0) -> Timing:
    """Median and spread of single runs.

    Example:
        >>> summary([1.0, 2.0, 9.0, 2.0, 3.0])
        Timing(median_ms=2.0, low_ms=1.0, high_ms=9.0, runs=5, host_ms=0.0)
    """
    samples = Samples(tuple(times_ms))
    return Timing(samples.median_ms, samples.low_ms, samples.high_ms, samples.repetitions, host_ms)


def time_once(run: Run, device: str, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one run by a clock of the host, synchronized before and after.

    Example:
        >>> time_once(lambda: None, "cpu") < 1
        True
    """
    synchronize(device)
    start = clock()
    run()
    synchronize(device)
    return clock() - start


def time_together(
    runs: dict[str, Run],
    *,
    device: str = "cuda",
    rounds: int = 5,
    budget_ms: float = 100,
    warm_up: int = 2,
) -> dict[str, Timing]:
    """Times several functions in alternation.

    Args:
        runs: functions by name; their results are discarded.
        device: `cpu` or `cuda`.
        rounds: the number of rounds; each function runs in each.
        budget_ms: time of one function over all rounds; it runs at least once per round.
        warm_up: untimed runs before the first round.

    Example:
        >>> x = torch.randn(64, 64)
        >>> found = time_together({"relu": x.relu, "in place": x.relu_}, device="cpu", budget_ms=1)
        >>> sorted(found), found["relu"].runs >= 5
        (['in place', 'relu'], True)
    """
    timer = _CudaTimer() if device.startswith("cuda") else _CpuTimer()
    turns: dict[str, int] = {}
    for name, run in runs.items():
        for _ in range(warm_up):  # compilers and allocators
            run()
        timer.prepare(name, run)
        once = statistics.median(timer.times(name, run, 3 if budget_ms > 3 else 1))
        turns[name] = max(1, min(MOST_RUNS, round(budget_ms / rounds / max(once, 1e-3))))
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            times[name] += timer.times(name, runs[name], turns[name])
    return {name: summary(values, timer.host_ms.get(name, 0.0)) for name, values in times.items()}


def time_samples(
    prepare: Callable[[], Run],
    *,
    device: str = "cuda",
    repetitions: int = 100,
    budget_ms: float = 1000,
    warm_up: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> Samples:
    """Times one function repeatedly and returns every time.

    Args:
        prepare: returns the function to time. It is called before each repetition, outside the timed part: for a
            backward pass it runs the forward pass, so that the time of backward has none of it.
        device: `cpu` or `cuda`.
        repetitions: the number of repetitions, unless the budget ends earlier.
        budget_ms: no repetition but the first begins after this time on the host's clock, preparations included.
        warm_up: untimed repetitions, at least one; the budget limits them as well.
        clock: clock in seconds, for the budget.

    Example:
        >>> x = torch.ones(4, requires_grad=True)
        >>> def prepare() -> Run:
        ...     loss = (x * x).sum()             # forward: not timed
        ...     return loss.backward             # backward: timed
        >>> time_samples(prepare, device="cpu", repetitions=3).repetitions
        3
    """
    assert min(repetitions, warm_up) >= 1, "repetitions and warm_up must be at least 1"
    timer = _CudaTimer() if device.startswith("cuda") else _CpuTimer()
    start = clock()
    for number in range(warm_up):
        if number == 0 or (clock() - start) * 1e3 < budget_ms:
            timer.set_wait("", timer.launch(prepare()))  # the last launch counts: the first may compile
    times: list[float] = []
    start = clock()
    while len(times) < repetitions and (not times or (clock() - start) * 1e3 < budget_ms):
        times += timer.times("", prepare(), 1)
    return Samples(tuple(times))


def time_in_sequence(run: Run, *, device: str = "cuda", count: int = 10, repetitions: int = 5) -> Timing:
    """Times a function that runs several times in a row, as kernels in a training step: what the previous run read and
    wrote is in the caches, and the device does not wait for launches between the runs.

    Args:
        run: the function.
        device: `cpu` or `cuda`.
        count: runs in a row, of which each repetition is the mean.
        repetitions: timed sequences, after an untimed one.

    Example:
        >>> x = torch.randn(64, 64)
        >>> time_in_sequence(x.relu, device="cpu", count=3, repetitions=2).runs
        2
    """

    def sequence() -> None:
        for _ in range(count):
            run()

    timer = _CudaTimer(clears=False) if device.startswith("cuda") else _CpuTimer()
    timer.set_wait("", min(timer.launch(sequence) for _ in range(2)), longest_ms=count * LONGEST_WAIT_MS)
    found = summary([ms / count for ms in timer.times("", sequence, repetitions)])
    return replace(found, host_ms=timer.host_ms.get("", 0.0) / count)


def cache_state(device: str) -> CacheState:
    """The state of a device's caches before each timed run.

    Example:
        >>> cache_state("cuda").value, cache_state("cpu").value
        ('cleared', 'as left')
    """
    return CacheState.CLEARED if device.startswith("cuda") else CacheState.AS_LEFT


class _CpuTimer:
    """Milliseconds of runs by the host's clock."""

    def __init__(self) -> None:
        self.host_ms: dict[str, float] = {}

    def prepare(self, name: str, run: Run) -> None:
        """Does nothing: a CPU launches nothing asynchronously."""

    def launch(self, run: Run) -> float:
        """Runs once; there is no launch to measure."""
        run()
        return 0.0

    def set_wait(self, name: str, host_ms: float, *, longest_ms: float = LONGEST_WAIT_MS) -> None:
        """Does nothing: there is no launch to wait for."""

    def times(self, name: str, run: Run, count: int) -> list[float]:
        times = []
        for _ in range(count):
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) * 1e3)
        return times


class _CudaTimer:
    """Milliseconds of runs by CUDA events, launched ahead, with a cold L2 cache unless `clears` is false."""

    def __init__(self, *, clears: bool = True) -> None:
        self.host_ms: dict[str, float] = {}
        self.waits: dict[str, int] = {}
        self.buffer = torch.empty(CLEARED_BYTES, dtype=torch.int8, device="cuda") if clears else None

    def prepare(self, name: str, run: Run) -> None:
        """Measures how long the host takes to launch the run: the median of five."""
        self.set_wait(name, statistics.median(self.launch(run) for _ in range(5)))

    def launch(self, run: Run) -> float:
        """Runs once; returns the milliseconds that the host took to launch it."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3

    def set_wait(self, name: str, host_ms: float, *, longest_ms: float = LONGEST_WAIT_MS) -> None:
        """Sets the time that the device waits for the launch of a run."""
        self.host_ms[name] = host_ms
        self.waits[name] = round(min(1.5 * host_ms, longest_ms) * CYCLES_PER_MS)

    def times(self, name: str, run: Run, count: int) -> list[float]:
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)
        ]
        torch.cuda.synchronize()
        for start, stop in events:
            if self.buffer is not None:
                self.buffer.zero_()
            torch.cuda._sleep(self.waits[name])
            start.record()
            run()
            stop.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) for start, stop in events]


def ceilings(device: str = "cuda", precision: str | None = None) -> Ceilings:
    """Measures the device with a copy and a product of random square matrices, in a second at most.

    Args:
        device: on a GPU the copy has up to 1 GiB, on a CPU 64 MiB.
        precision: dtype of a GPU's product: fp32, tf32, bf16 or fp16; 16 bits by default. A CPU always uses fp32.
    """
    if not device.startswith("cuda"):
        return _measure_ceilings("cpu", 64 * 2**20, 1024, torch.float32, "cpu", 0)
    free, _ = torch.cuda.mem_get_info()
    major, minor = torch.cuda.get_device_capability()
    common = "bf16" if (major, minor) >= BF16_CAPABILITY else "fp16"
    dtype = getattr(torch, TORCH_NAMES.get(precision or common, "float32"))
    size = 8192 if free > 2 * 2**30 else 4096
    name = torch.cuda.get_device_name()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        measured = _measure_ceilings("cuda", min(2**30, free // 8), size, dtype, name, 10 * major + minor)
    finally:
        torch.set_float32_matmul_precision(before)
    return replace(measured, matmul_dtype="tf32") if precision == "tf32" else measured


def _measure_ceilings(
    device: str, count: int, size: int, dtype: torch.dtype, name: str, capability: int
) -> Ceilings:
    source = torch.empty(count, dtype=torch.int8, device=device).random_()
    target = torch.empty_like(source)
    # random values: zeros draw less power and run faster
    a = torch.randn(size, size, device=device, dtype=dtype)
    b = torch.randn(size, size, device=device, dtype=dtype)
    out = torch.empty_like(a)
    runs: dict[str, Run] = {
        "copy": lambda: target.copy_(source),
        "matmul": lambda: torch.mm(a, b, out=out),
    }
    times = time_together(runs, device=device, budget_ms=50)
    return Ceilings(
        copy_bytes_per_s=2 * count / times["copy"].seconds,
        matmul_flops_per_s=2 * size**3 / times["matmul"].seconds,
        device=name,
        capability=capability,
        matmul_dtype=str(dtype).removeprefix("torch."),
    )
