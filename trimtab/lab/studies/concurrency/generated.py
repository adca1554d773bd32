"""The result of one way of generating, as plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Generated:
    """The result of one way."""

    seconds: float
    """From the signal to all processes until the last completion."""
    start_seconds: float
    """From the start until all processes had loaded the model."""
    tokens: int
    processes: int
    torch_threads: int
    """torch's threads of each worker, on a CPU."""
    host_bytes: int
    """Sum of the processes' peak resident memory; shared libraries are counted in each."""
    device_bytes: int | None
    """GPU memory of all processes, CUDA contexts included; None on a CPU."""
    digests: list[str]
    """Digest of each completion, in the order of the prompts."""
