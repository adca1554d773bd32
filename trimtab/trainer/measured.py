"""What a run measures, to compare with its plan: step times, memory, evaluations, checkpoints.

Step times come from the intervals between two device reads, which logging does anyway; nothing here
synchronizes with the device. Intervals with a session's first steps, a compilation or a CUDA graph capture are
left out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

WARM_STEPS = 2
"""Steps at the beginning of a session that are not representative: one-time work, and the memory measurement."""
_KEPT = 10_000
"""Intervals and durations that are remembered, the latest ones."""


@dataclass(frozen=True)
class Spread:
    """Seconds of something that was done several times: median, tenth and ninetieth percentile.

    Example:
        >>> Spread.of([(1.0, 2), (3.0, 1)])
        Spread(median=1.0, low=1.0, high=3.0, count=3)
    """

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, measured: Iterable[tuple[float, int]]) -> Spread | None:
        """Of (seconds, how many times); None where there are none."""
        ordered = sorted(measured)
        count = sum(times for _, times in ordered)
        if not count:
            return None
        return cls(_at(ordered, count, 0.5), _at(ordered, count, 0.1), _at(ordered, count, 0.9), count)


def _at(ordered: list[tuple[float, int]], count: int, share: float) -> float:
    """The value below which `share` of all lie."""
    passed = 0
    for seconds, times in ordered:
        passed += times
        if passed >= share * count:
            return seconds
    return ordered[-1][0]


@dataclass(frozen=True)
class Measured:
    """What was measured in one start of a run; None for what was not. Bytes and seconds."""

    first_step: int
    last_step: int
    step: Spread | None = None
    """Of an optimizer step, evaluations and saves not counted."""
    warm: bool = False
    """Whether `step` is measured on steps without one-time work; if not, the run was too short for that."""
    evaluation: Spread | None = None
    checkpoint: Spread | None = None
    """From handing the state over until it is on the disk, of the saves that training waited for."""
    checkpoint_stall: Spread | None = None
    """How long each save blocked training."""
    buckets: dict[str, int] | None = None
    """Tensors at the peak of the step that was measured, by bucket."""
    highest: int | None = None
    """Peak allocated memory of torch's caching allocator over the whole run, on a GPU."""
    reserved: int | None = None
    """Peak reserved memory of the allocator, on a GPU."""
    process: int | None = None
    """The whole process: on the GPU where other processes are known, resident memory on a CPU."""
    host: int | None = None
    """Resident memory of the process on the host."""

    @property
    def allocated(self) -> int | None:
        """Tensors at the peak of a step."""
        return None if self.buckets is None else sum(self.buckets.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {**asdict(self), "allocated": self.allocated}


@dataclass
class Stopwatch:
    """Collects durations while the loop runs."""

    first_step: int
    buckets: dict[str, int] | None = None
    aside: float = 0.0
    """Seconds since the last interval began that belong to no step."""
    _clean: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _others: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _evaluations: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _checkpoints: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _stalls: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _steps: int = 0
    _one_time: tuple[int, int] = (0, 0)

    def interval(self, seconds: float, steps: int, *, one_time: tuple[int, int]) -> None:
        """Steps between two reads of the device; `one_time` counts captured graphs and compilations so far."""
        begun, self._steps = self._steps, self._steps + steps
        changed, self._one_time = one_time != self._one_time, one_time
        per_step = (max(0.0, seconds - self.aside) / steps, steps)
        self.aside = 0.0
        (self._others if begun < WARM_STEPS or changed else self._clean).append(per_step)

    def evaluated(self, seconds: float) -> None:
        """An evaluation was made."""
        self._evaluations.append((seconds, 1))

    def saved(self, seconds: float, *, whole: bool) -> None:
        """A checkpoint was handed over, and written as well if `whole`."""
        self._stalls.append((seconds, 1))
        self.aside += seconds
        if whole:
            self._checkpoints.append((seconds, 1))

    @property
    def warm(self) -> bool:
        """Whether there are times of steps without one-time work."""
        return bool(self._clean)

    def measured(self, last_step: int, **memory: int | None) -> Measured:
        """Everything so far; `memory` are the fields of `Measured` that the caller reads from the device."""
        return Measured(
            self.first_step,
            last_step,
            step=Spread.of(self._clean or self._others),
            warm=self.warm,
            evaluation=Spread.of(self._evaluations),
            checkpoint=Spread.of(self._checkpoints),
            checkpoint_stall=Spread.of(self._stalls),
            buckets=self.buckets,
            **memory,
        )
