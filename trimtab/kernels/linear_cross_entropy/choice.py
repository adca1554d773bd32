"""Which loss runs and what it may hold, decided once, with the reason. No torch."""

# N tokens, C hidden size, V vocabulary

from __future__ import annotations

from dataclasses import dataclass

from trimtab.facts.dtypes import BYTES
from trimtab.kernels.linear_cross_entropy.schedule import LEAST_BYTES, row_stride

SHARE = 16
"""The loss may hold this part of a device's memory: 9 GB of an H200's, 1.5 GB of a 24 GB card's."""


@dataclass(frozen=True)
class LossChoice:
    """The implementation, the most that its `memory_bytes` may be, and why."""

    impl: str
    memory_bytes: int | None
    reason: str


def choose_loss(*, triton: bool, memory_bytes: int, dtype: str, tokens: int, vocabulary: int) -> LossChoice:
    """Chooses the loss of a run.

    Args:
        triton: whether the device runs Triton kernels.
        memory_bytes: what the device has.
        dtype: the format computed in.
        tokens: of a microbatch.
        vocabulary: entries of the head.

    Example:
        >>> loss = choose_loss(triton=True, memory_bytes=24 * 2**30, dtype="bf16", tokens=4096, vocabulary=151_936)
        >>> loss.impl, loss.memory_bytes
        ('triton', 1244659712)
        >>> choose_loss(triton=False, memory_bytes=0, dtype="fp32", tokens=512, vocabulary=1000).impl
        'chunked'
    """
    if not triton:
        return LossChoice("chunked", None, "a few rows of logits at a time, on any device")
    logits = tokens * row_stride(vocabulary) * BYTES[dtype]
    allowed = min(logits, max(memory_bytes // SHARE, LEAST_BYTES))
    return LossChoice("triton", allowed, "the fastest exact one, within a share of the device's memory")
