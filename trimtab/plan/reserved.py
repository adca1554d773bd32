"""Memory that torch's allocator reserves for a training step, and the process's total on the device. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trimtab.plan.allocations import Event, persistent_sizes, step_allocations
from trimtab.plan.allocator import CachingAllocator
from trimtab.plan.job import Job
from trimtab.plan.memory import BYTES_OUTSIDE_ALLOCATOR, CUBLAS_BYTES

STEPS = 2
"""Simulated steps; later steps reserve nothing new."""


@dataclass(frozen=True)
class Reserved:
    """Device memory of a process: allocated, reserved, and the CUDA context.

    Example:
        >>> Reserved(allocated=10, reserved=12, context=3).process
        15
    """

    allocated: int
    """Bytes of blocks in use at the peak: tensors, rounded to 512 bytes, and cuBLAS's workspaces."""
    reserved: int
    """Bytes that the allocator has reserved from the driver."""
    context: int
    """The CUDA context and loaded kernels."""

    @property
    def process(self) -> int:
        """Total bytes of the process on the device."""
        return self.reserved + self.context

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        names = ("allocated", "reserved", "context", "process")
        return {name: getattr(self, name) for name in names}


def reserved_memory(job: Job, *, graphs: bool = False, expandable: bool = True) -> Reserved:
    """Returns the memory that the allocator reserves for a job on a GPU, including weights and optimizer states.

    Args:
        job: the training job.
        graphs: whether forward and backward are captured as CUDA graphs. Their memory is in a private pool, which the
            optimizer step cannot use.
        expandable: whether segments are expandable (`expandable_segments:True`).

    Example:
        >>> from trimtab.facts.shapes import uniform_shape
        >>> tiny = uniform_shape("llama", 512, 64, 128, 2, num_heads=4, num_kv_heads=2, head_dim=16)
        >>> job = Job(tiny, 2, 64, 1, "bf16", "bf16", "bf16", "adamw_8bit", "triton", "cuda", pointwise="triton")
        >>> reserved_memory(job).reserved // 2**20
        82
    """
    default = CachingAllocator(expandable=expandable)
    for nbytes in persistent_sizes(job):
        default.allocate(nbytes)
    pool = CachingAllocator(expandable=expandable) if graphs else default
    for _ in range(2):  # one cuBLAS workspace per thread: forward and backward
        pool.allocate(CUBLAS_BYTES["cuda"] // 2)
    events = list(step_allocations(job))
    optimizer_start = _find_optimizer_step(events) if graphs else len(events)
    peak = 0
    for _ in range(STEPS):
        live: dict[int, tuple[CachingAllocator, int]] = {}
        for index, (number, size) in enumerate(events):
            if size is None:
                allocator, block = live.pop(number)
                allocator.free(block)
                continue
            allocator = pool if index < optimizer_start else default
            live[number] = (allocator, allocator.allocate(size))
            peak = max(peak, default.allocated + (pool.allocated if graphs else 0))
        assert not live, "a step leaves tensors allocated"
    return Reserved(
        peak, default.reserved + (pool.reserved if graphs else 0), BYTES_OUTSIDE_ALLOCATOR["cuda"]
    )


def _find_optimizer_step(events: list[Event]) -> int:
    """Returns the index of the last allocation, which is the optimizer's."""
    return max((index for index, event in enumerate(events) if event.size is not None), default=len(events))
