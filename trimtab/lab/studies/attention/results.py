"""The result types of the attention study, shared by `measure` and the report. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimtab.lab.samples import CacheState, Samples, damaged_record


@dataclass(frozen=True)
class PassTimes:
    """Times of the forward and the backward pass, each without the other."""

    forward: Samples
    backward: Samples
    cache: CacheState

    @property
    def total_ms(self) -> float:
        """Medians of both passes, added up.

        Example:
            >>> PassTimes(Samples((1.0,)), Samples((2.0,)), CacheState.AS_LEFT).total_ms
            3.0
        """
        return self.forward.median_ms + self.backward.median_ms

    @property
    def quartiles_ms(self) -> tuple[float, float]:
        """First and third quartile of both passes, added up: half of the repetitions lie between them.

        Example:
            >>> samples = Samples((1.0, 2.0, 3.0, 4.0, 9.0))
            >>> PassTimes(samples, samples, CacheState.AS_LEFT).quartiles_ms
            (4.0, 8.0)
        """
        low, high = (
            self.forward.percentile(share) + self.backward.percentile(share) for share in (0.25, 0.75)
        )
        return low, high

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "forward": self.forward.to_dict(),
            "backward": self.backward.to_dict(),
            "cache": self.cache.value,
        }

    @staticmethod
    def from_dict(result: Mapping[str, Any]) -> PassTimes:
        """Parses a record; raises DataError if it is damaged."""
        try:
            forward, backward, cache = result["forward"], result["backward"], CacheState(result["cache"])
        except (KeyError, ValueError) as error:
            raise damaged_record("results", f"{type(error).__name__}: {error}") from None
        return PassTimes(Samples.from_dict(forward), Samples.from_dict(backward), cache)


@dataclass(frozen=True)
class AttentionResult:
    """One cell of attention, measured."""

    times: PassTimes
    before_backward_bytes: int
    """q, k, v, the output and what forward saved."""
    peak_bytes: int
    """Peak memory of both passes: q, k, v and the gradients included."""
    usable_bytes: int
    """Memory that the cell could use: all of a GPU's; on a host, the limit of the process."""
    compile_seconds: float
    """Seconds that torch.compile took for both passes; 0 where nothing is compiled."""
    compile_cached: bool
    """Whether compiled code of an earlier run was found on disk: then the seconds are those of loading it."""
    compiled_alongside: int | None = None
    """If it was compiled by another process before: the number of processes that worked alongside that one."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            **self.times.to_dict(),
            "before_backward_bytes": self.before_backward_bytes,
            "peak_bytes": self.peak_bytes,
            "usable_bytes": self.usable_bytes,
            "compile_seconds": round(self.compile_seconds, 3),
            "compile_cached": self.compile_cached,
            "compiled_alongside": self.compiled_alongside,
        }

    @staticmethod
    def from_dict(result: Mapping[str, Any]) -> AttentionResult:
        """Parses a record; raises DataError if it is damaged."""
        times = PassTimes.from_dict(result)
        try:
            return AttentionResult(
                times,
                int(result["before_backward_bytes"]),
                int(result["peak_bytes"]),
                int(result["usable_bytes"]),
                float(result["compile_seconds"]),
                bool(result["compile_cached"]),
                result.get("compiled_alongside"),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise damaged_record("results", f"{type(error).__name__}: {error}") from None
