"""Disk space of a run: the largest number of checkpoints that exist at the same time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from trimtab.checkpoint import spec as checkpoint_spec
from trimtab.facts.errors import ResourceError
from trimtab.facts.units import format_bytes


@dataclass(frozen=True)
class SaveSchedule:
    """When a run saves checkpoints and how many it keeps, from its recipe."""

    keep: int
    """`save_total_limit`: how many of the newest checkpoints are kept."""
    save_steps: int | None
    """Steps between checkpoints; None to save only at the end."""
    best_steps: int | None
    """Steps between evaluations that may find a best checkpoint; None if only the final evaluation can."""
    total_steps: int | None
    """Steps of the run; None if not known yet."""

    @property
    def saves(self) -> int | None:
        """The largest number of saved steps, including the last step; None if unknown."""
        every = [steps for steps in (self.save_steps, self.best_steps) if steps is not None]
        if not every:
            return 1
        total = self.total_steps
        if total is None:
            return None
        count = sum(total // steps for steps in every)
        if len(every) == 2:
            count -= total // math.lcm(*every)
        return count + int(all(total % steps for steps in every))

    def max_checkpoints(self, keep: int | None = None) -> int:
        """Returns the most checkpoints on disk at the same time, including the one being written, if `keep` are kept.

        The oldest is deleted only after the newest is complete. The best checkpoint is kept in addition if others are
        saved after it: with `save_steps` unset, each save but the last is the best so far and thus among the newest.

        Example:
            >>> SaveSchedule(keep=2, save_steps=10, best_steps=None, total_steps=100).max_checkpoints()
            3
            >>> SaveSchedule(keep=2, save_steps=None, best_steps=None, total_steps=100).max_checkpoints()
            1
        """
        keep = self.keep if keep is None else keep
        count = keep + 1 + int(self._best_is_older(keep))
        return count if self.saves is None else min(self.saves, count)

    def _best_is_older(self, keep: int) -> bool:
        """Whether the best checkpoint can be older than the newest `keep` while another is written."""
        if self.best_steps is None or self.save_steps is None:
            return False
        total, every = self.total_steps, self.save_steps
        if total is None:
            return True
        # Worst case: the first evaluation is the best; this many checkpoints are saved after it.
        later = total // every - self.best_steps // every + int(total % every > 0)
        return self.best_steps <= total and later > keep


@dataclass(frozen=True)
class Disk:
    """Disk space of a run's checkpoints."""

    checkpoint_bytes: int
    """One checkpoint: weights, optimizer states, and small metadata."""
    saving: SaveSchedule

    @property
    def total_bytes(self) -> int:
        """Peak bytes: the checkpoints that are kept, the best checkpoint, and the one being written."""
        return self.checkpoint_bytes * self.saving.max_checkpoints()

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "checkpoint_bytes": self.checkpoint_bytes,
            "total_bytes": self.total_bytes,
            "checkpoints": self.saving.max_checkpoints(),
        }


def estimate(weights: int, states: int, num_tensors: int, saving: SaveSchedule) -> Disk:
    """Returns the disk space of a run from the bytes of its trained weights and optimizer states.

    Example:
        >>> disk = estimate(1000, 0, 0, SaveSchedule(keep=1, save_steps=5, best_steps=None, total_steps=None))
        >>> disk.total_bytes == 2 * disk.checkpoint_bytes
        True
    """
    return Disk(checkpoint_spec.checkpoint_bytes(weights, states, num_tensors), saving)


def check_disk(disk: Disk, free_bytes: int, folder: str, *, resumed: bool = False) -> None:
    """Raise a ResourceError if the checkpoints do not fit in the free disk space.

    For a resumed run `free_bytes` includes its own checkpoints, which later ones replace; its folder can be moved
    only as a whole.

    Example:
        >>> saving = SaveSchedule(keep=1, save_steps=5, best_steps=None, total_steps=None)
        >>> check_disk(estimate(1000, 0, 0, saving), 10**9, "runs/a")
    """
    if disk.total_bytes <= free_bytes:
        return
    count = disk.saving.max_checkpoints()
    subject = (
        "the checkpoint takes" if count == 1 else f"the {count} checkpoints that exist at the same time take"
    )
    move = (
        f"move {folder} to another disk and resume it there" if resumed else "set output_dir to another disk"
    )
    fewer = _fewer(disk, free_bytes)
    raise ResourceError(
        f"{subject} {format_bytes(disk.total_bytes)} and {folder} has {format_bytes(free_bytes)} free",
        f"free some space or {move}" if fewer is None else f"free some space, {move}, or {fewer}",
    )


def _fewer(disk: Disk, free_bytes: int) -> str | None:
    """Recipe keys that make the checkpoints fit, as the last part of a remedy; None if there are none."""
    fitting = free_bytes // disk.checkpoint_bytes
    for keep in range(disk.saving.keep - 1, 0, -1):
        if disk.saving.max_checkpoints(keep) <= fitting:
            return f"set save_total_limit: {keep}"
    if not fitting:
        return None
    keys = ["save_steps: null"] if disk.saving.save_steps is not None else []
    keys += ["eval_steps: null"] if disk.saving.best_steps is not None else []
    return f"save only at the end ({' and '.join(keys)})"
