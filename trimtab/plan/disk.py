"""Disk that a run takes: checkpoints as often as they are kept."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from trimtab.checkpoint import spec as checkpoint_spec
from trimtab.facts.errors import ResourceError
from trimtab.facts.units import format_bytes


@dataclass(frozen=True)
class Disk:
    """Bytes on disk."""

    checkpoint_bytes: int
    """One checkpoint: weights, optimizer states, a little for names and positions."""
    total_bytes: int
    """The most that stands at once: those kept, the best one, and the one being written."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return asdict(self)


def estimate(weights: int, states: int, num_tensors: int, keep: int, *, best: bool) -> Disk:
    """Disk of a run that keeps its newest `keep` checkpoints, and the best if evaluation chooses one.

    Example:
        >>> disk = estimate(1000, 0, 0, keep=1, best=False)
        >>> disk.total_bytes == 2 * disk.checkpoint_bytes
        True
    """
    one = checkpoint_spec.checkpoint_bytes(weights, states, num_tensors)
    return Disk(one, checkpoint_spec.disk_bytes(one, keep, best=best))


def check_disk(disk: Disk, free_bytes: int, folder: str) -> None:
    """Raise a ResourceError if the checkpoints do not fit beside what is on the disk already."""
    if disk.total_bytes > free_bytes:
        raise ResourceError(
            f"the checkpoints take up to {format_bytes(disk.total_bytes)} and {folder} has "
            f"{format_bytes(free_bytes)} free",
            "free some space, set output_dir to another disk, or lower save_total_limit",
        )
