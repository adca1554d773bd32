"""The processes that share a checkpoint store: this process alone, or all ranks through a separate gloo group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from trimtab.facts.errors import TrimtabError

T = TypeVar("T")


class Ranks:
    """Runs a function on every rank; an error on one rank is raised on all.

    A separate process group is needed because a thread writes checkpoints while training uses the default group, and
    collectives of two threads in one group would interleave. Messages have a few kilobytes, hence gloo. The constructor
    is collective.
    """

    def __init__(self) -> None:
        self.group: dist.ProcessGroup | None = None
        self.rank = 0
        self.count = 1
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.group = dist.new_group(backend="gloo")
            self.rank = dist.get_rank()
            self.count = dist.get_world_size()

    def close(self) -> None:
        """Destroy the group and its threads, which could abort the process if they outlived the interpreter."""
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self.group = None

    @property
    def is_leader(self) -> bool:
        """Whether this rank publishes and prunes checkpoints."""
        return self.rank == 0

    def run_on_all(self, work: Callable[[], T]) -> list[T]:
        """The results of all ranks, by rank. The error of the first failed rank is raised on all."""
        if self.group is None:
            assert self.count == 1, "several ranks use a closed store"
            return [work()]
        result: T | None = None
        failure: TrimtabError | OSError | None = None
        try:
            result = work()
        except (TrimtabError, OSError) as error:
            failure = error
        reports: list[Any] = [None] * self.count
        dist.all_gather_object(reports, (result, failure), group=self.group)
        for _, error_of_rank in reports:
            if error_of_rank is not None:
                raise error_of_rank
        return [result for result, _ in reports]

    def run_on_leader(self, work: Callable[[], T]) -> T:
        """Run a function on rank 0 only and return its result on every rank."""
        results: list[T | None] = self.run_on_all(lambda: work() if self.is_leader else None)
        return results[0]  # type: ignore[return-value]
