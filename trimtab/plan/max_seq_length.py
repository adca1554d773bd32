"""The longest sequence on which a job can be trained within a memory limit. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trimtab.adapt.spec_recompute import count_policies
from trimtab.facts.devices import DeviceFacts
from trimtab.kernels.linear_cross_entropy.choice import MEMORY_DIVISOR
from trimtab.plan import memory_search
from trimtab.plan.job import Job

STEP = 256
"""Granularity of sequence lengths in tokens."""
MAX_TOKENS = 1 << 26
"""The longest sequence that is tried."""


@dataclass(frozen=True)
class MaxSeqLength:
    """The longest sequence that fits, and its memory setting."""

    tokens: int
    """0 if not even the shortest sequence fits."""
    setting: memory_search.MemorySetting | None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        if self.setting is None:
            return {"tokens": 0}
        return {
            "tokens": self.tokens,
            "recompute": count_policies(self.setting.policies),
            "mlp_tiles": self.setting.mlp_tiles,
            "needed": self.setting.needed,
            "host": self.setting.host,
        }


def largest_within(bytes_of: Callable[[int], int], budget: int, maximum: int) -> int:
    """Returns the largest count from 1 to `maximum` whose bytes are within a budget; 0 if even one exceeds it.

    Bytes grow with the count and are piecewise linear: the next count to try is where linear interpolation meets the
    budget, so a few steps suffice.

    Example:
        >>> largest_within(lambda count: 1000 + 7 * count, 2000, 10**6)
        142
    """
    low, low_bytes = 1, bytes_of(1)
    if low_bytes > budget:
        return 0
    high, high_bytes = 2, bytes_of(2) if maximum > 1 else budget + 1
    while high_bytes <= budget and high < maximum:
        slope = max((high_bytes - low_bytes) / (high - low), 1.0)
        guess = high + int((budget - high_bytes) / slope * 1.02) + 1
        low, low_bytes = high, high_bytes
        high = min(max(guess, high + 1), 64 * high, maximum)
        high_bytes = bytes_of(high)
    if high_bytes <= budget:
        return min(high, maximum)
    while high - low > 1:
        share = (budget - low_bytes) / (high_bytes - low_bytes)
        # Slightly below the interpolated count, and never so close to one end that the other cannot move.
        edge = max((high - low) // 16, 1)
        middle = min(max(low + int((high - low) * share), low + edge), high - edge)
        middle_bytes = bytes_of(middle)
        if middle_bytes <= budget:
            low, low_bytes = middle, middle_bytes
        else:
            high, high_bytes = middle, middle_bytes
    return low


def largest_fitting(job_of: Callable[[int], Job], device: DeviceFacts, budget: int, maximum: int) -> int:
    """Returns the largest count whose job fits a memory budget with any setting.

    The largest number of tiles nearly always has the lowest memory, so it alone is tried first; the search is repeated
    with all numbers of tiles only if fewer tiles would allow a larger count.
    """

    def most_tiles(count: int) -> int:
        job = job_of(count)
        return memory_search.lowest_memory(job, device, tiles=max(memory_search.tile_counts(job, None)))

    def any_tiles(count: int) -> int:
        return memory_search.lowest_memory(job_of(count), device)

    count = largest_within(most_tiles, budget, maximum)
    if count == maximum or any_tiles(count + 1) > budget:
        return count
    return largest_within(any_tiles, budget, maximum)


def find_max_seq_length(job: Job, device: DeviceFacts, limit: int) -> MaxSeqLength:
    """Returns the longest sequence that fits, with recomputation, tiles, loss chunks and offloading as needed.

    The model's maximum positions are not taken into account. The memory that searches leave free for prediction errors
    stays free (`memory_search.SLACK`); `trimtab plan --solve max_seq_length` also answers without it.

    Args:
        job: the training job; its length, policies, tiles and dequantized copies are ignored.
        device: the device; its free host memory limits offloading.
        limit: bytes on the device, including the process itself.

    Example:
        >>> from trimtab.adapt.spec import LoraSettings
        >>> from trimtab.adapt.spec_quantized import Quantization
        >>> from trimtab.facts.shapes import uniform_shape
        >>> llama = uniform_shape("llama", 128256, 4096, 14336, 32, num_heads=32, num_kv_heads=8, head_dim=128)
        >>> job = Job(llama, batch=1, tokens=4096, accumulation=1, dtype="bf16", weights_dtype="bf16",
        ...           gradient_dtype="bf16", optimizer="adamw_8bit", attention="triton", device="cuda",
        ...           pointwise="triton", loss_impl="triton", lora=LoraSettings(r=32),
        ...           quantization=Quantization("nf4", double=True, impl="triton"))
        >>> gpu = DeviceFacts("NVIDIA H200", "cuda", 150 * 10**9, capability=(9, 0), bf16=True)
        >>> find_max_seq_length(job, gpu, 24 * 10**9).tokens > 100_000
        True
    """
    tokens = longest_tokens(job, device, limit, slack=True)
    if tokens == 0:
        return MaxSeqLength(0, None)
    setting, _ = memory_search.find_setting(
        _job_with_tokens(job.changed(dequantized_layers=0), tokens, limit), device, limit
    )
    return MaxSeqLength(tokens, setting)


def longest_tokens(job: Job, device: DeviceFacts, limit: int, *, slack: bool = False) -> int:
    """Returns only the length, which is faster; 0 if not even `STEP` tokens fit.

    With `slack`, the memory that searches leave free for prediction errors stays free (`memory_search.SLACK`).
    """
    job = job.changed(dequantized_layers=0)
    within = memory_search.usable_bytes(job, limit) if slack else limit
    return STEP * largest_fitting(
        lambda steps: _job_with_tokens(job, steps * STEP, limit), device, within, MAX_TOKENS // STEP
    )


def _job_with_tokens(job: Job, tokens: int, limit: int) -> Job:
    memory = limit // MEMORY_DIVISOR if job.loss_impl == "triton" else job.loss_memory
    return job.changed(tokens=tokens, loss_memory=memory, policies=(), mlp_tiles=1)
