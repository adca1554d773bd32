"""The ways to generate for a list of prompts; no torch."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Completion = TypeVar("Completion")


class Way(enum.Enum):
    """How prompts are generated."""

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
    """Processes with a model each; prompts are dealt out in turns."""

    @property
    def is_concurrent(self) -> bool:
        """Whether several workers generate at the same time."""
        return self in (Way.THREADS, Way.ASYNCIO_THREADS, Way.PROCESSES)

    def processes(self, workers: int) -> int:
        """How many processes load the model."""
        return workers if self is Way.PROCESSES else 1

    def torch_threads(self, cores: int, workers: int) -> int:
        """CPU threads of torch's operations for each worker: the cores are shared out, none is used twice.

        Example:
            >>> Way.PROCESSES.torch_threads(8, 4), Way.BATCH.torch_threads(8, 4)
            (2, 8)
        """
        return max(1, cores // workers) if self.is_concurrent else cores


def generate_all(
    way: Way,
    prompts: Sequence[str],
    workers: int,
    one: Callable[[str], Completion],
    many: Callable[[list[str]], list[Completion]],
) -> list[Completion]:
    """The completions of all prompts, in their order.

    Args:
        way: how; a single process of `Way.PROCESSES` goes through its share one by one.
        prompts: texts.
        workers: threads at most.
        one: completes one prompt.
        many: completes a list of prompts in batches.

    Example:
        >>> generate_all(Way.THREADS, ["a", "b"], 2, str.upper, lambda texts: [t.upper() for t in texts])
        ['A', 'B']
    """
    if way is Way.BATCH:
        return many(list(prompts))
    if way is Way.THREADS:
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(one, prompts))
    if way is Way.ASYNCIO:
        return asyncio.run(_direct(prompts, one))
    if way is Way.ASYNCIO_THREADS:
        return asyncio.run(_in_threads(prompts, workers, one))
    return [one(prompt) for prompt in prompts]


async def _direct(prompts: Sequence[str], one: Callable[[str], Completion]) -> list[Completion]:
    async def complete(prompt: str) -> Completion:
        await asyncio.sleep(0)  # gives way to the other coroutines, as awaited input or output would
        return one(prompt)

    return list(await asyncio.gather(*map(complete, prompts)))


async def _in_threads(
    prompts: Sequence[str], workers: int, one: Callable[[str], Completion]
) -> list[Completion]:
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(workers) as pool:
        return list(await asyncio.gather(*(loop.run_in_executor(pool, one, prompt) for prompt in prompts)))
