"""The processes that share one store: this one alone, or all ranks through a gloo group of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from trimtab.facts.errors import TrimtabError

T = TypeVar("T")


class Ranks:
    """Runs a piece of work on every rank and lets all of them fail together.

    The group is the store's own: checkpoints are written by a thread while training uses the default group,
    and two threads in one group would mix up their messages. It carries a few kilobytes, hence gloo.
    Building one is collective.
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
        """Ends the group and its threads: those of one that outlives the interpreter can abort the process."""
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self.group = None

    @property
    def is_leader(self) -> bool:
        """True on the rank that publishes and prunes."""
        return self.rank == 0

    def run_on_all(self, work: Callable[[], T]) -> list[T]:
        """Everybody's results, by rank. The error of the first rank that has one is raised on all."""
        if self.group is None:
            assert self.count == 1, "a store that was closed is asked by several ranks"
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
        """The result of rank 0, which alone does the work, on every rank."""
        results: list[T | None] = self.run_on_all(lambda: work() if self.is_leader else None)
        return results[0]  # type: ignore[return-value]
