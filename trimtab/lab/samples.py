"""All times of repeated runs, with their statistics. Imports no torch: reports read them."""

from __future__ import annotations

import enum
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimtab.facts.errors import DataError

DECIMALS = 4
"""Decimals of milliseconds in a record: 0.1 µs, finer than the resolution of CUDA events."""


class CacheState(enum.Enum):
    """The state of the caches when a timed run begins."""

    CLEARED = "cleared"
    """A buffer larger than the GPU's L2 cache is written before each run: inputs come from memory."""
    AS_LEFT = "as left"
    """As the previous run left them: on a CPU nothing is evicted."""


@dataclass(frozen=True)
class Samples:
    """Milliseconds of each repetition, in order.

    Example:
        >>> found = Samples((2.0, 4.0, 3.0))
        >>> found.mean_ms, found.std_ms, found.median_ms, found.repetitions
        (3.0, 1.0, 3.0, 3)
    """

    times_ms: tuple[float, ...]

    def __post_init__(self) -> None:
        assert self.times_ms, "at least one repetition"

    @property
    def repetitions(self) -> int:
        """The number of repetitions."""
        return len(self.times_ms)

    @property
    def mean_ms(self) -> float:
        """Arithmetic mean."""
        return statistics.fmean(self.times_ms)

    @property
    def std_ms(self) -> float:
        """Sample standard deviation (divisor n − 1); 0 for a single repetition.

        Example:
            >>> Samples((5.0,)).std_ms
            0.0
        """
        return statistics.stdev(self.times_ms) if len(self.times_ms) > 1 else 0.0

    @property
    def median_ms(self) -> float:
        """Median."""
        return statistics.median(self.times_ms)

    @property
    def low_ms(self) -> float:
        """10th percentile."""
        return self.percentile(0.1)

    @property
    def high_ms(self) -> float:
        """90th percentile."""
        return self.percentile(0.9)

    @property
    def spread(self) -> float:
        """The distance from the 10th to the 90th percentile, as a share of the median.

        Example:
            >>> Samples((1.9, 2.0, 2.3)).spread
            0.2
        """
        return round((self.high_ms - self.low_ms) / max(self.median_ms, 1e-9), 6)

    def percentile(self, share: float) -> float:
        """A percentile of the times, without interpolation.

        Example:
            >>> Samples((4.0, 1.0, 2.0, 3.0, 5.0)).percentile(0.25)
            2.0
        """
        return sorted(self.times_ms)[round(share * (len(self.times_ms) - 1))]

    def to_dict(self) -> dict[str, Any]:
        """For a record: the rounded times, and their statistics for readers of the file.

        Example:
            >>> Samples((1.0, 2.0)).to_dict()
            {'times_ms': [1.0, 2.0], 'mean_ms': 1.5, 'std_ms': 0.7071, 'median_ms': 1.5}
        """
        return {
            "times_ms": [round(time, DECIMALS) for time in self.times_ms],
            "mean_ms": round(self.mean_ms, DECIMALS),
            "std_ms": round(self.std_ms, DECIMALS),
            "median_ms": round(self.median_ms, DECIMALS),
        }

    @staticmethod
    def from_dict(record: Mapping[str, Any]) -> Samples:
        """The times of a record; raises DataError if there are none.

        Example:
            >>> Samples.from_dict({"times_ms": [1.0, 2.0]}).mean_ms
            1.5
        """
        try:
            times = tuple(float(time) for time in record["times_ms"])
        except (KeyError, TypeError, ValueError) as error:
            raise damaged_record("times", f"{type(error).__name__}: {error}") from None
        if not times:
            raise damaged_record("times", "there are none")
        return Samples(times)


def damaged_record(part: str, reason: str) -> DataError:
    """The error for a damaged part of a record.

    Example:
        >>> str(damaged_record("times", "there are none"))
        'times of a record are damaged: there are none; measure once more: the same command with --remeasure'
    """
    return DataError(
        f"{part} of a record are damaged: {reason}", "measure once more: the same command with --remeasure"
    )
