"""Selects the loss implementation of a run and its memory budget, with the reason. Does not import torch."""

# N tokens, C hidden size, V vocabulary

from __future__ import annotations

from dataclasses import dataclass

from trimtab.facts.dtypes import BYTES
from trimtab.kernels.linear_cross_entropy.schedule import MIN_BYTES, row_stride

MEMORY_DIVISOR = 16
"""The loss may use 1/16 of the device's memory: 9 GB of an H200's, 1.5 GB of a 24 GB card's."""


@dataclass(frozen=True)
class LossChoice:
    """The implementation, its largest `memory_bytes`, and the reason."""

    impl: str
    memory_bytes: int | None
    reason: str


def choose_loss(*, triton: bool, memory_bytes: int, dtype: str, tokens: int, vocabulary: int) -> LossChoice:
    """Selects the loss implementation of a run.

    Args:
        triton: whether the device runs Triton kernels.
        memory_bytes: memory of the device.
        dtype: the compute dtype.
        tokens: tokens per microbatch.
        vocabulary: entries of the head.

    Example:
        >>> loss = choose_loss(triton=True, memory_bytes=24 * 2**30, dtype="bf16", tokens=4096, vocabulary=151_936)
        >>> loss.impl, loss.memory_bytes
        ('triton', 1244659712)
        >>> choose_loss(triton=False, memory_bytes=0, dtype="fp32", tokens=512, vocabulary=1000).impl
        'chunked'
    """
    if not triton:
        return LossChoice("chunked", None, "runs on any device, a few rows of logits at a time")
    logits = tokens * row_stride(vocabulary) * BYTES[dtype]
    allowed = min(logits, max(memory_bytes // MEMORY_DIVISOR, MIN_BYTES))
    return LossChoice(
        "triton", allowed, "the fastest exact implementation, within a share of the device's memory"
    )
