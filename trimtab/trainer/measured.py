"""Measurements of a run, to compare with its plan: step times, memory, evaluations, checkpoints.

Step times come from the intervals between two device reads, which logging does anyway; nothing here
synchronizes with the device. Intervals with the first steps after a start or resume, a compilation or a CUDA
graph capture are left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

WARM_STEPS = 2
"""Steps after a start or resume that are not representative: one-time work, and the memory measurement."""
_MAX_SAMPLES = 10_000
"""The number of latest intervals and durations that are stored."""


@dataclass(frozen=True)
class TimeSpread:
    """Seconds of a repeated operation: median, 10th and 90th percentile, and the number of repetitions.

    Example:
        >>> TimeSpread.of([(1.0, 2), (3.0, 1)])
        TimeSpread(median=1.0, low=1.0, high=3.0, count=3)
    """

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, measured: Iterable[tuple[float, int]]) -> TimeSpread | None:
        """Computes the spread of (seconds, repetitions); None if there are none."""
        ordered = sorted(measured)
        count = sum(times for _, times in ordered)
        if not count:
            return None
        return cls(
            _quantile(ordered, count, 0.5),
            _quantile(ordered, count, 0.1),
            _quantile(ordered, count, 0.9),
            count,
        )


def _quantile(ordered: list[tuple[float, int]], count: int, share: float) -> float:
    """The weighted quantile at `share`."""
    passed = 0
    for seconds, times in ordered:
        passed += times
        if passed >= share * count:
            return seconds
    return ordered[-1][0]


@dataclass(frozen=True)
class Measured:
    """Measurements of a run since its start or resume, in bytes and seconds; None if not measured."""

    first_step: int
    last_step: int
    step: TimeSpread | None = None
    """Time of an optimizer step, without evaluations and saves."""
    warm: bool = False
    """Whether `step` is measured on steps without one-time work; if not, the run was too short for that."""
    evaluation: TimeSpread | None = None
    checkpoint: TimeSpread | None = None
    """Time until a checkpoint is on disk, for the saves that training waited for."""
    checkpoint_stall: TimeSpread | None = None
    """How long each save blocked training."""
    buckets: dict[str, int] | None = None
    """Tensor bytes at the peak of the measured step, by bucket."""
    highest: int | None = None
    """Peak allocated memory of torch's caching allocator over the whole run, on a GPU."""
    reserved: int | None = None
    """Peak reserved memory of the allocator, on a GPU."""
    process: int | None = None
    """Memory of the whole process: on the GPU if it is known per process, resident memory on a CPU."""
    host: int | None = None
    """Resident memory of the process on the host."""

    @property
    def allocated(self) -> int | None:
        """Tensor bytes at the peak of a step."""
        return None if self.buckets is None else sum(self.buckets.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {**asdict(self), "allocated": self.allocated}


@dataclass
class Stopwatch:
    """Collects durations while the loop runs."""

    first_step: int
    buckets: dict[str, int] | None = None
    excluded: float = 0.0
    """Seconds in the current interval that belong to no step."""
    _clean: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_MAX_SAMPLES))
    _others: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_MAX_SAMPLES))
    _evaluations: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_MAX_SAMPLES))
    _checkpoints: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_MAX_SAMPLES))
    _stalls: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_MAX_SAMPLES))
    _steps: int = 0
    _one_time: tuple[int, int] = (0, 0)

    def interval(self, seconds: float, steps: int, *, one_time: tuple[int, int]) -> None:
        """Records the steps between two device reads; `one_time`: graph captures and compilations so far."""
        begun, self._steps = self._steps, self._steps + steps
        changed, self._one_time = one_time != self._one_time, one_time
        per_step = (max(0.0, seconds - self.excluded) / steps, steps)
        self.excluded = 0.0
        (self._others if begun < WARM_STEPS or changed else self._clean).append(per_step)

    def evaluated(self, seconds: float) -> None:
        """Records an evaluation."""
        self._evaluations.append((seconds, 1))

    def saved(self, seconds: float, *, written: bool) -> None:
        """Records a save; `written`: its seconds include the write to disk."""
        self._stalls.append((seconds, 1))
        self.excluded += seconds
        if written:
            self._checkpoints.append((seconds, 1))

    @property
    def warm(self) -> bool:
        """Whether there are times of steps without one-time work."""
        return bool(self._clean)

    def measured(self, last_step: int, **memory: int | None) -> Measured:
        """Returns the measurements so far; `memory`: fields of `Measured` that the caller reads from the device."""
        return Measured(
            self.first_step,
            last_step,
            step=TimeSpread.of(self._clean or self._others),
            warm=self.warm,
            evaluation=TimeSpread.of(self._evaluations),
            checkpoint=TimeSpread.of(self._checkpoints),
            checkpoint_stall=TimeSpread.of(self._stalls),
            buckets=self.buckets,
            **memory,
        )
