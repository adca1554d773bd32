"""What one way of generating gave, as plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Generated:
    """What one way gave."""

    seconds: float
    """From the signal to all processes until the last completion."""
    start_seconds: float
    """Until all processes had loaded the model."""
    tokens: int
    processes: int
    torch_threads: int
    """Of each worker, on a CPU."""
    host_bytes: int
    """The sum of the processes' peaks of resident memory; libraries that they share are counted in each."""
    device_bytes: int | None
    """GPU memory that all processes together took, contexts included; None on a CPU."""
    digests: list[str]
    """Of each completion, in the order of the prompts."""
