"""Disk that a run takes: as many checkpoints as it writes and keeps at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from trimtab.checkpoint import spec as checkpoint_spec
from trimtab.facts.errors import ResourceError
from trimtab.facts.units import format_bytes


@dataclass(frozen=True)
class SaveSchedule:
    """When a run saves and what it keeps, as in its recipe."""

    keep: int
    """`save_total_limit`: the newest so many checkpoints."""
    save_steps: int | None
    """Every so many steps; None for the end only."""
    best_steps: int | None
    """Steps between evaluations that may find a best checkpoint; None where only the one at the end can."""
    total_steps: int | None
    """Steps of the run; None where they are not known yet."""

    @property
    def saves(self) -> int | None:
        """Steps that are saved at most, the last one included; None where their number is not known."""
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
        """Checkpoints that are on the disk at once, the one being written included, where `keep` are kept.

        The oldest goes only after the newest is complete. The best one is kept besides, where others are saved after
        it: with `save_steps` unset each save but the last is the best so far, and so among the newest.

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
        """Whether the best checkpoint can be older than the newest `keep` while another one is written."""
        if self.best_steps is None or self.save_steps is None:
            return False
        total, every = self.total_steps, self.save_steps
        if total is None:
            return True
        # The first evaluation finds the best of all; this many are saved after it whatever their loss.
        later = total // every - self.best_steps // every + int(total % every > 0)
        return self.best_steps <= total and later > keep


@dataclass(frozen=True)
class Disk:
    """Bytes on disk."""

    checkpoint_bytes: int
    """One checkpoint: weights, optimizer states, a little for names and positions."""
    saving: SaveSchedule

    @property
    def total_bytes(self) -> int:
        """The most that is there at once: what is kept, the best one, and the one being written."""
        return self.checkpoint_bytes * self.saving.max_checkpoints()

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "checkpoint_bytes": self.checkpoint_bytes,
            "total_bytes": self.total_bytes,
            "checkpoints": self.saving.max_checkpoints(),
        }


def estimate(weights: int, states: int, num_tensors: int, saving: SaveSchedule) -> Disk:
    """Disk of a run with so many bytes of trained weights and optimizer states.

    Example:
        >>> disk = estimate(1000, 0, 0, SaveSchedule(keep=1, save_steps=5, best_steps=None, total_steps=None))
        >>> disk.total_bytes == 2 * disk.checkpoint_bytes
        True
    """
    return Disk(checkpoint_spec.checkpoint_bytes(weights, states, num_tensors), saving)


def check_disk(disk: Disk, free_bytes: int, folder: str, *, resumed: bool = False) -> None:
    """Raise a ResourceError if the checkpoints do not fit in the free disk space.

    For a resumed run `free_bytes` includes its own checkpoints, which later ones replace; its folder can only move as
    a whole.

    Example:
        >>> saving = SaveSchedule(keep=1, save_steps=5, best_steps=None, total_steps=None)
        >>> check_disk(estimate(1000, 0, 0, saving), 10**9, "runs/a")
    """
    if disk.total_bytes <= free_bytes:
        return
    count = disk.saving.max_checkpoints()
    subject = (
        "the checkpoint takes" if count == 1 else f"{count} checkpoints, as many as there are at once, take"
    )
    move = (
        f"move {folder} to another disk and resume it there" if resumed else "set output_dir to another disk"
    )
    fewer = _fewer(disk, free_bytes)
    raise ResourceError(
        f"{subject} {format_bytes(disk.total_bytes)} and {folder} has room for {format_bytes(free_bytes)}",
        f"free some space or {move}" if fewer is None else f"free some space, {move}, or {fewer}",
    )


def _fewer(disk: Disk, free_bytes: int) -> str | None:
    """Keys that make the checkpoints fit, as the last part of a remedy; None where none do."""
    fitting = free_bytes // disk.checkpoint_bytes
    for keep in range(disk.saving.keep - 1, 0, -1):
        if disk.saving.max_checkpoints(keep) <= fitting:
            return f"set save_total_limit: {keep}"
    if not fitting:
        return None
    keys = ["save_steps: null"] if disk.saving.save_steps is not None else []
    keys += ["eval_steps: null"] if disk.saving.best_steps is not None else []
    return f"save only at the end ({' and '.join(keys)})"
