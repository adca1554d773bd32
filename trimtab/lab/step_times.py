"""Times of steps by two clocks, as stored in records. Imports no torch: reports read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimtab.lab.samples import DECIMALS, Samples, damaged_record

LEAST_STEPS = 2
"""Minimum number of timed steps, even when the budget has run out: a standard deviation needs two."""


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds of each timed step.

    Example:
        >>> times = StepTimes(Samples((10.2, 10.2)), Samples((10.0, 10.0)), (90.0,))
        >>> round(times.clock_gap, 4), times.first_ms
        (0.02, 90.0)
    """

    host: Samples
    """By the host's clock, synchronized before and after each step."""
    device: Samples | None
    """Between events on the device; None on a CPU."""
    warm_up_ms: tuple[float, ...] = ()
    """Warm-up steps, by the host's clock."""

    @property
    def clock_gap(self) -> float | None:
        """By how much the host's median time exceeds the device's, as a share."""
        if self.device is None:
            return None
        return self.host.median_ms / max(self.device.median_ms, 1e-9) - 1

    @property
    def first_ms(self) -> float:
        """The first step of the process: of the warm-up, if there was one."""
        return self.warm_up_ms[0] if self.warm_up_ms else self.host.times_ms[0]

    def to_dict(self) -> dict[str, Any]:
        """For a record."""
        return {
            "host": self.host.to_dict(),
            "device": None if self.device is None else self.device.to_dict(),
            "warm_up_ms": [round(time, DECIMALS) for time in self.warm_up_ms],
        }

    @staticmethod
    def from_dict(record: Mapping[str, Any]) -> StepTimes:
        """The times of a record; raises DataError if there are none.

        Example:
            >>> StepTimes.from_dict({"host": {"times_ms": [2.0]}, "device": None, "warm_up_ms": []}).host.mean_ms
            2.0
        """
        try:
            device = record["device"]
            return StepTimes(
                Samples.from_dict(record["host"]),
                None if device is None else Samples.from_dict(device),
                tuple(float(time) for time in record["warm_up_ms"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise damaged_record("times", f"{type(error).__name__}: {error}") from None
