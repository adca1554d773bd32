"""Dealing the windows of one step to ranks and microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from trimtab.facts.errors import DataError

Item = TypeVar("Item")


@dataclass(frozen=True)
class StepShape:
    """Windows of a step: `batch_size` × `accumulation` on each of `dp_size` ranks, of which this is
    `dp_rank`.
    """

    batch_size: int
    accumulation: int = 1
    dp_rank: int = 0
    dp_size: int = 1

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.accumulation < 1:
            raise DataError(
                f"a step of {self.batch_size} windows × {self.accumulation} is empty",
                "set per_device_train_batch_size and gradient_accumulation_steps to 1 or more",
            )
        assert 0 <= self.dp_rank < self.dp_size, (self.dp_rank, self.dp_size)

    @property
    def num_windows(self) -> int:
        """Of a full step, over all ranks."""
        return self.batch_size * self.accumulation * self.dp_size


def deal(items: Sequence[Item], shape: StepShape) -> list[list[Item]]:
    """The microbatches of this rank: a stretch of the step's windows, cut into batches.

    The last step of an epoch may hold fewer windows than a full one. They are then spread evenly, and every
    rank still gets as many microbatches as the others, empty ones if need be: ranks that gather weights
    together must go through the model equally often.

    Example:
        >>> deal([1, 2, 3, 4, 5], StepShape(2, 3)), deal([1, 2, 3], StepShape(1, 1, dp_rank=1, dp_size=4))
        ([[1, 2], [3, 4], [5]], [[2]])
        >>> deal([1, 2, 3], StepShape(1, 1, dp_rank=3, dp_size=4))
        [[]]
    """
    assert items, "a step is never empty"
    assert len(items) <= shape.num_windows, (len(items), shape)
    most, extra = divmod(len(items), shape.dp_size)
    start = shape.dp_rank * most + min(shape.dp_rank, extra)
    mine = items[start : start + most + (shape.dp_rank < extra)]
    longest = most + (extra > 0)
    num_micro = -(-longest // shape.batch_size)
    size = shape.batch_size
    return [list(mine[i * size : (i + 1) * size]) for i in range(num_micro)]
