"""The ways to generate for a list of prompts. Imports no torch."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Completion = TypeVar("Completion")


class Way(enum.Enum):
    """A way to generate for several prompts."""

    ONE_BY_ONE = "one-by-one"
    """A loop."""
    BATCH = "batch"
    """One call with all prompts: each pass through the model adds a token to every row."""
    THREADS = "threads"
    """A pool of threads that share one model."""
    ASYNCIO = "asyncio"
    """Coroutines that call the model directly, all scheduled at once on one event loop."""
    ASYNCIO_THREADS = "asyncio-threads"
    """Coroutines that hand each call to a pool of threads and await it (`run_in_executor`)."""
    PROCESSES = "processes"
    """Processes with a model each; prompts are distributed round-robin."""

    @property
    def is_concurrent(self) -> bool:
        """Whether several workers generate at the same time."""
        return self in (Way.THREADS, Way.ASYNCIO_THREADS, Way.PROCESSES)

    def processes(self, workers: int) -> int:
        """The number of processes that load the model."""
        return workers if self is Way.PROCESSES else 1

    def torch_threads(self, cores: int, workers: int) -> int:
        """torch's CPU threads of each worker: concurrent workers divide the cores.

        Example:
            >>> Way.PROCESSES.torch_threads(8, 4), Way.BATCH.torch_threads(8, 4)
            (2, 8)
        """
        return max(1, cores // workers) if self.is_concurrent else cores


def generate_all(
    way: Way,
    prompts: Sequence[str],
    workers: int,
    complete_one: Callable[[str], Completion],
    complete_many: Callable[[list[str]], list[Completion]],
) -> list[Completion]:
    """The completions of all prompts, in their order.

    Args:
        way: the way; each process of `Way.PROCESSES` completes its share one by one.
        prompts: the prompts.
        workers: the maximum number of threads.
        one: completes one prompt.
        many: completes a list of prompts in batches.

    Example:
        >>> generate_all(Way.THREADS, ["a", "b"], 2, str.upper, lambda texts: [t.upper() for t in texts])
        ['A', 'B']
    """
    if way is Way.BATCH:
        return complete_many(list(prompts))
    if way is Way.THREADS:
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(complete_one, prompts))
    if way is Way.ASYNCIO:
        return asyncio.run(_direct(prompts, complete_one))
    if way is Way.ASYNCIO_THREADS:
        return asyncio.run(_in_threads(prompts, workers, complete_one))
    return [complete_one(prompt) for prompt in prompts]


async def _direct(prompts: Sequence[str], complete_one: Callable[[str], Completion]) -> list[Completion]:
    async def complete(prompt: str) -> Completion:
        await asyncio.sleep(0)  # yields to the other coroutines, as awaited I/O would
        return complete_one(prompt)

    return list(await asyncio.gather(*map(complete, prompts)))


async def _in_threads(
    prompts: Sequence[str], workers: int, complete_one: Callable[[str], Completion]
) -> list[Completion]:
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(workers) as pool:
        return list(
            await asyncio.gather(*(loop.run_in_executor(pool, complete_one, prompt) for prompt in prompts))
        )
