"""CPU threads of a forward pass: one if the pass is too small to gain from more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

MAX_SINGLE_THREAD_WORK = 8_000_000
"""Parameters times tokens. The starter model (4.7 million parameters) decodes a token as fast on one thread as on two
that spin-wait, and 5 to 10 % faster than on two that sleep in between (benchmarks/results/cpu-wait-policy.json)."""


@contextmanager
def limit_threads(parameters: int, tokens: int, device: torch.device) -> Iterator[None]:
    """Run a small forward pass on one CPU thread, others on torch's number of threads.

    Example:
        >>> with limit_threads(1_000_000, tokens=1, device=torch.device("cpu")):
        ...     torch.get_num_threads()
        1
    """
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1 or parameters * tokens > MAX_SINGLE_THREAD_WORK:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
