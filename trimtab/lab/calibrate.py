"""Measures this machine for the planner, in under a minute: rates of copies and products, every kind of kernel with
forward and backward, launch overhead, the link to the host, the disk.

    from trimtab.lab.calibrate import calibrate
    write_calibration(calibrate("auto"))

The most informative measurements come first; they end when the time is up. Ctrl-C leaves no file behind.
"""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from trimtab.facts.calibration import Calibration, KernelSample
from trimtab.facts.devices import DeviceFacts
from trimtab.facts.errors import RecipeError, ResourceError, is_out_of_memory
from trimtab.facts.operations import OperationKind
from trimtab.lab.launch_overhead import host_seconds, launch_seconds
from trimtab.lab.machine_state import (
    clock_warnings,
    disk_rates,
    host_link,
    load_warnings,
    sustained_slowdown,
)
from trimtab.lab.probes import Probe, ProbeGroup
from trimtab.lab.probes_kernels import copy_groups, kernel_groups
from trimtab.lab.probes_products import SLOWEST, probe_rate, product_dtypes, product_groups
from trimtab.lab.records import timestamp, versions
from trimtab.lab.timing import Timing, time_in_sequence, time_together
from trimtab.plan.rates import INTERPOLATED
from trimtab.run.device import current_gpu, detect

Progress = Callable[[str, float], None]
"""Called with the name of the current measurement and the elapsed share of the time."""

SECONDS = {"cuda": 50.0, "cpu": 45.0}
BUDGET_MS = {"cuda": 4.0, "cpu": 15.0}
"""Milliseconds for one probe."""
ROUNDS = 3
SMALL = 2**24
"""Bytes that a probe on a GPU moves, below which its inputs stay in the L2 cache between the kernels of a step."""
DOUBTFUL_SPREAD = 0.15
DOUBTFUL_SHARE = 0.2
"""Share of probes with a larger spread than `DOUBTFUL_SPREAD`, above which a warning is added."""
FALLING_RATE = 0.9
"""Final rate of products relative to the first one, below which the clock counts as throttled."""
LONGEST_SECONDS = {"cuda": 0.1, "cpu": 0.3}
"""Estimated seconds of a probe at the rate of large products, above which it is skipped."""
CACHED_SHARE = 0.4
"""Share of a GPU's free memory that torch's allocator may cache between probes."""
LARGE_COPY = 2**25
"""Minimum bytes of a copy that counts for the best rate: smaller ones fit into caches."""


def calibrate(
    device: str = "auto",
    threads: int | None = None,
    progress: Progress | None = None,
    *,
    folder: Path | None = None,
    seconds: float | None = None,
) -> Calibration:
    """Measures a device.

    Args:
        device: auto, cpu, cuda or cuda:N.
        threads: CPU threads, torch's current number by default; ignored on a GPU.
        progress: called before each measurement.
        folder: where a temporary file measures the disk; the current folder by default.
        seconds: the time limit, 50 on a GPU and 45 on a CPU by default; a slow machine measures fewer sizes.

    Raises:
        ResourceError: the device does not exist, or has too little free memory.
        RecipeError: the device's name is unknown, or `threads` is below 1.

    Example:
        >>> found = calibrate("cpu", seconds=1.0)                                    # doctest: +SKIP
        >>> found.flops["fp32"] > 1e9                                                # doctest: +SKIP
        True
    """
    if threads is not None and threads < 1:
        raise RecipeError(f"threads is {threads}", "give at least 1")
    with current_gpu(device):
        facts = detect(device)
        with _torch_threads(threads if facts.kind == "cpu" else None) as used:
            measuring = _CalibrationRun(facts, seconds or SECONDS[facts.kind], progress or _silent)
            return measuring.run(folder or Path.cwd(), used if facts.kind == "cpu" else None)


def _silent(label: str, share: float) -> None:
    """Reports nothing."""


@contextmanager
def _torch_threads(threads: int | None) -> Iterator[int]:
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


class _CalibrationRun:
    """A calibration in progress."""

    def __init__(self, device: DeviceFacts, seconds: float, progress: Progress) -> None:
        self.device, self.kind = device, device.kind
        self.started = time.perf_counter()
        self.seconds, self.progress = seconds, progress
        self.samples: list[KernelSample] = []
        self.spreads: list[float] = []
        self.warnings = load_warnings(self.kind)
        self.left_out = 0
        self.rates: dict[str, float] = {}
        self.sustained = 1.0

    def run(self, folder: Path, threads: int | None) -> Calibration:
        """Runs all measurements in order."""
        free = self.device.available_bytes
        self.rates = self._estimate_rates()
        training = "bf16" if self.device.bf16 else "fp32"
        self._report("launch overhead")
        host = host_seconds(self.device, training) if self.kind == "cuda" else {}
        launch = host["full"] if host else launch_seconds(self.device, training)
        self._report("disk")
        write, read = self._disk(folder)
        to_host, from_host = host_link() if self.kind == "cuda" else (None, None)
        before = probe_rate(self.kind, training)
        if self.kind == "cuda":
            self._report("sustained clock rate")
            self.sustained = sustained_slowdown(training)
        for group in copy_groups(self.device, free):
            self._measure(group)
        copy = self._best_copy()
        kernels = [kernel_groups(self.device, dtype, free) for dtype in self._kernel_dtypes(training)]
        products = [
            product_groups(self.device, dtype, rate, free, brief=self.kind == "cuda" and dtype != training)
            for dtype, rate in self.rates.items()
        ]
        for group in _interleaved([*kernels, *products]):
            if time.perf_counter() - self.started > self.seconds and self._has_products():
                self.left_out += 1
                continue
            self._measure(group)
        self._check_clock(training, before)
        self._check_spread()
        return Calibration(
            device=self.device.name,
            flops={dtype: self._best_rate(dtype) for dtype in self.rates},
            copy=copy,
            launch_seconds=launch,
            samples=tuple(self.samples),
            host_seconds=host,
            to_host=to_host,
            from_host=from_host,
            disk_write=write,
            disk_read=read,
            threads=threads,
            versions=versions(("torch", "triton", "trimtab"), cuda=self.kind == "cuda"),
            measured_at=timestamp(),
            warnings=tuple(self.warnings),
        )

    def _estimate_rates(self) -> dict[str, float]:
        """Estimated rates of the dtypes to measure, without those that a CPU only emulates."""
        self._report("dtypes")
        rates = {dtype: probe_rate(self.kind, dtype) for dtype in product_dtypes(self.device)}
        return {
            dtype: rate
            for dtype, rate in rates.items()
            if self.kind == "cuda" or rate * SLOWEST > rates["fp32"]
        }

    def _kernel_dtypes(self, training: str) -> list[str]:
        """The dtypes of kernels other than matrix products, the training dtype first.

        A CPU also runs the other of bf16 and fp32, even if it only emulates bf16: its kernels then take longer than in
        fp32 although they move half the bytes, so that times in fp32 do not tell times in bf16.
        """
        if self.kind == "cuda":
            return [training]
        others = [dtype for dtype in ("fp32", "bf16") if dtype != training and dtype in self.rates]
        return [training, *others]

    def _measure(self, group: ProbeGroup) -> None:
        self._report(group.label)
        try:
            with group.within():
                for probe in group.build():
                    if self._estimate(probe) > LONGEST_SECONDS[self.kind]:
                        self.left_out += 1
                        continue
                    times = self._time(probe)
                    self.samples.append(probe.sample(times.seconds * self._slower(probe)))
                    self.spreads.append(times.spread)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self.warnings.append(f"{group.label} was skipped: it does not fit into free memory")
            gc.collect()
        if self.kind == "cuda" and torch.cuda.memory_reserved() > CACHED_SHARE * self.device.available_bytes:
            torch.cuda.empty_cache()  # rarely: releasing memory and reserving it again takes milliseconds

    def _time(self, probe: Probe) -> Timing:
        """The time of a probe. A GPU's L2 cache holds the inputs of small kernels in a training step, too."""
        if self.kind == "cuda" and probe.moved < SMALL:
            probe.run()  # compiles
            return time_in_sequence(probe.run, device=self.kind)
        runs = {"probe": probe.run}
        return time_together(
            runs, device=self.kind, rounds=ROUNDS, budget_ms=BUDGET_MS[self.kind], warm_up=1
        )["probe"]

    def _slower(self, probe: Probe) -> float:
        """How much longer a probe takes in a training step, at the clock rate that a step sustains."""
        return self.sustained if probe.kind in INTERPOLATED and probe.moved >= SMALL else 1.0

    def _estimate(self, probe: Probe) -> float:
        """Seconds of a probe at the rate of large products."""
        return probe.flops / self.rates[probe.dtype] if probe.dtype in self.rates else 0.0

    def _disk(self, folder: Path) -> tuple[float | None, float | None]:
        try:
            return disk_rates(folder)
        except OSError as error:
            self.warnings.append(f"the disk was not measured: {folder}: {error.strerror or error}")
            return None, None

    def _has_products(self) -> bool:
        """Whether the training dtype has a product: without one it would have no rate."""
        required = {"bf16" if self.device.bf16 else "fp32"}
        return required <= {sample.dtype for sample in self.samples if sample.kind is OperationKind.PRODUCT}

    def _best_copy(self) -> float:
        copies = [
            s.moved / s.seconds
            for s in self.samples
            if s.kind is OperationKind.COPY and s.moved >= LARGE_COPY
        ]
        if not copies:
            raise ResourceError(
                f"{self.device.name} has too little free memory for a calibration",
                "end other programs that use it and calibrate again",
            )
        return max(copies)

    def _best_rate(self, dtype: str) -> float:
        rates = [
            s.flops / s.seconds for s in self.samples if s.kind is OperationKind.PRODUCT and s.dtype == dtype
        ]
        return max(rates, default=0.0) or probe_rate(self.kind, dtype)

    def _check_clock(self, dtype: str, before: float) -> None:
        after = probe_rate(self.kind, dtype)
        if after < FALLING_RATE * before:
            self.warnings.append(
                f"products became slower during the measurement, by {1 - after / before:.0%}: "
                "a throttled clock, or other work on the machine"
            )
        if self.kind == "cuda":
            x = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)
            self.warnings += clock_warnings(lambda: x @ x)

    def _check_spread(self) -> None:
        doubtful = sum(spread > DOUBTFUL_SPREAD for spread in self.spreads)
        if doubtful > DOUBTFUL_SHARE * len(self.spreads):
            self.warnings.append(
                f"{doubtful} of {len(self.spreads)} measurements vary by more than {DOUBTFUL_SPREAD:.0%}: "
                "other work on the machine, or a clock that changes"
            )
        if self.left_out:
            self.warnings.append(
                f"{self.left_out} measurements were skipped, to finish within {self.seconds:.0f} s; times of such "
                "sizes are extrapolated"
            )

    def _report(self, label: str) -> None:
        self.progress(label, min(1.0, (time.perf_counter() - self.started) / self.seconds))


def _interleaved(streams: list[Iterator[ProbeGroup]]) -> Iterator[ProbeGroup]:
    """One group of each stream at a time, so that the least informative groups of all streams come last."""
    for groups in itertools.zip_longest(*streams):
        yield from (group for group in groups if group is not None)
