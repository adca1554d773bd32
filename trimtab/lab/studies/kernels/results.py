"""The result of a kernel study's cell: profiles of three passes, and the parts of attention. Imports no torch."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from trimtab.facts.errors import DataError
from trimtab.lab.profile_data import Profile


class ProfiledPass(enum.Enum):
    """The profiled pass."""

    INFERENCE = "inference"
    """A forward pass that saves nothing."""
    FORWARD = "forward"
    """A forward pass that saves activations for backward."""
    FULL = "full step"
    """Forward, backward and AdamW."""


@dataclass(frozen=True)
class AttentionPart:
    """One part of plain attention over all layers of a step: its FLOPs and its time in both passes."""

    name: str
    forward_flops: int
    backward_flops: int
    forward_seconds: float
    backward_seconds: float


@dataclass(frozen=True)
class KernelsResult:
    """The result of a cell.

    With NVTX ranges nothing is profiled: `ranges` counts those that were emitted.
    """

    profiles: Mapping[ProfiledPass, Profile] = field(default_factory=dict)
    unprofiled_seconds: Mapping[ProfiledPass, float] = field(default_factory=dict)
    """By the host's clock, without the profiler: the median."""
    attention: tuple[AttentionPart, ...] = ()
    """Parts of plain attention; empty for fused attention."""
    trace: str | None = None
    ranges: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON.

        Example:
            >>> result = KernelsResult(ranges=12)
            >>> KernelsResult.from_dict(result.to_dict()) == result
            True
        """
        return {
            "profiles": {which.value: profile.to_dict() for which, profile in self.profiles.items()},
            "unprofiled_seconds": {
                which.value: seconds for which, seconds in self.unprofiled_seconds.items()
            },
            "attention": [asdict(part) for part in self.attention],
            "trace": self.trace,
            "ranges": self.ranges,
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> KernelsResult:
        """Inverse of `to_dict`; raises DataError if the record is damaged."""
        try:
            return KernelsResult(
                {
                    ProfiledPass(name): Profile.from_dict(profile)
                    for name, profile in data["profiles"].items()
                },
                {ProfiledPass(name): float(seconds) for name, seconds in data["unprofiled_seconds"].items()},
                tuple(AttentionPart(**part) for part in data["attention"]),
                data["trace"],
                data["ranges"],
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"a result is damaged: {type(error).__name__}: {error}", "measure it again with --remeasure"
            ) from None
