"""The longest window that a job can be trained on within a limit: everything else as it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trimtab.adapt.spec_recompute import counted
from trimtab.facts.devices import DeviceFacts
from trimtab.kernels.linear_cross_entropy.choice import SHARE
from trimtab.plan import memory_search
from trimtab.plan.job import Job

STEP = 256
"""Lengths are multiples of it."""
MOST = 1 << 26
"""Longer ones are not looked at."""


@dataclass(frozen=True)
class Longest:
    """The longest window, and how it runs."""

    tokens: int
    """0 where not even the shortest fits."""
    setting: memory_search.MemorySetting | None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        if self.setting is None:
            return {"tokens": 0}
        return {
            "tokens": self.tokens,
            "recompute": counted(self.setting.policies),
            "mlp_tiles": self.setting.mlp_tiles,
            "needed": self.setting.needed,
            "host": self.setting.host,
        }


def longest_context(job: Job, device: DeviceFacts, limit: int) -> Longest:
    """The most tokens a window can have: recomputing, tiles, the loss and the host's memory are used as they must.

    What a model was trained for (its `max_positions`) is another matter and not looked at.

    Args:
        job: the rest of what is trained; its batch is kept, its own length, policies, tiles and unpacked layers are
            not looked at.
        device: where it runs; its host's free memory bounds what is kept there.
        limit: bytes on the device, the process itself included.

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
        >>> longest_context(job, gpu, 24 * 10**9).tokens > 100_000
        True
    """
    job = job.changed(unpacked_layers=0)
    within = memory_search.within_limit(job, limit)

    def fits(steps: int) -> bool:
        return memory_search.least(_at(job, steps * STEP, limit), device) <= within

    if not fits(1):
        return Longest(0, None)
    low, high = 1, 2
    while fits(high) and high * STEP < MOST:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    tokens = low * STEP
    setting, _ = memory_search.find_setting(_at(job, tokens, limit), device, limit)
    return Longest(tokens, setting)


def _at(job: Job, tokens: int, limit: int) -> Job:
    memory = limit // SHARE if job.loss_impl == "triton" else job.loss_memory
    return job.changed(tokens=tokens, loss_memory=memory, policies=(), mlp_tiles=1)
