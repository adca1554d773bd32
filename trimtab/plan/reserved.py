"""Memory that torch's allocator reserves for a training step, and the process's total on the device. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from trimtab.plan.allocations import Event, persistent_sizes, step_allocations
from trimtab.plan.allocator import CachingAllocator, rounded, segment_bytes
from trimtab.plan.job import Job
from trimtab.plan.memory import BYTES_OUTSIDE_ALLOCATOR

EAGER_STEPS = 2
"""Simulated eager steps, and those of a run before CUDA graphs are captured (`trainer.graphs`)."""


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
    claimed: int = 0
    """Smallest limit of the allocator with which the simulated steps run, if it has one: for a block that fits no free
    memory it demands the whole size, although an expandable segment only grows by what is missing. 0 if every block
    fits after free memory was returned."""

    @property
    def process(self) -> int:
        """Total bytes of the process on the device."""
        return self.reserved + self.context

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        names = ("allocated", "reserved", "context", "process")
        return {name: getattr(self, name) for name in names}


def reserved_memory(
    job: Job, *, graphs: bool = False, expandable: bool = True, limit: int | None = None
) -> Reserved:
    """Returns the memory that the allocator reserves for a job on a GPU, including weights and optimizer states.

    Args:
        job: the training job.
        graphs: whether forward and backward are captured as CUDA graphs. Their memory is in a private pool, which the
            optimizer step cannot use.
        expandable: whether segments are expandable (`expandable_segments:True`).
        limit: bytes that the allocator may reserve. Where a block would exceed it, free memory is returned first.

    Example:
        >>> from trimtab.facts.shapes import uniform_shape
        >>> tiny = uniform_shape("llama", 512, 64, 128, 2, num_heads=4, num_kv_heads=2, head_dim=16)
        >>> job = Job(tiny, 2, 64, 1, "bf16", "bf16", "bf16", "adamw_8bit", "triton", "cuda", pointwise="triton")
        >>> reserved_memory(job).reserved // 2**20
        82
    """
    run = _Run(job, expandable=expandable, limit=limit)
    for _ in range(EAGER_STEPS):
        run.eager_step()
    if graphs:
        run.captured_step()
    return Reserved(run.peak_allocated, run.peak_reserved, BYTES_OUTSIDE_ALLOCATOR["cuda"], run.claimed)


class _Run:
    """The allocators of a run: torch's default pool, and the private pool of CUDA graphs."""

    def __init__(self, job: Job, *, expandable: bool, limit: int | None = None) -> None:
        self.limit = limit
        self.default, self.pool = (CachingAllocator(expandable=expandable) for _ in range(2))
        self.step = step_allocations(job)
        self.live: dict[int, tuple[CachingAllocator, int]] = {}
        """(allocator, block) by tensor id."""
        self.peak_allocated = self.peak_reserved = self.claimed = 0
        self.returned = False
        """Whether the last step returned memory to stay below the limit."""
        for nbytes in persistent_sizes(job):
            self.default.allocate(nbytes)

    def eager_step(self) -> None:
        """A step without CUDA graphs. A run with graphs begins with them, and the second one may reserve memory too:
        the workspaces that the first one allocated are between its tensors."""
        if self.returned:  # as the trainer: `trainer.gpu_memory`
            self.default.empty_cache()
            self.returned = False
        for events in self.step:
            self._perform(events, self.default)
        assert all(number < 0 for number in self.live), "a step leaves tensors allocated"

    def captured_step(self) -> None:
        """A step whose forward and backward are captured as CUDA graphs: that of the first microbatch, and that of the
        others. Replays allocate nothing, and the gradients stay in the graphs' pool."""
        self._perform([Event(number, None) for number in self.live], self.default)
        self.default.empty_cache()
        self._perform(self.step.first, self.pool)
        self._perform(self.step.following, self.pool)
        self._perform(self.step.update, self.default)

    def _perform(self, events: Iterable[Event], allocator: CachingAllocator) -> None:
        """Performs allocations and frees, in an allocator."""
        for number, size in events:
            if size is None:
                owner, block = self.live.pop(number)
                owner.free(block)
            elif number not in self.live:
                if self._exceeds_limit(allocator, size):
                    self.default.empty_cache()
                    self.returned = True
                    if self._exceeds_limit(allocator, size):
                        self._claim(size)
                elif allocator is self.pool and not allocator.has_block(size):
                    self._claim(size)
                self.live[number] = (allocator, allocator.allocate(size))
                self.peak_allocated = max(self.peak_allocated, self.default.allocated + self.pool.allocated)
                self.peak_reserved = max(self.peak_reserved, self.default.reserved + self.pool.reserved)

    def _claim(self, size: int) -> None:
        reserved = self.default.reserved + self.pool.reserved
        self.claimed = max(self.claimed, reserved + segment_bytes(rounded(size)))

    def _exceeds_limit(self, allocator: CachingAllocator, size: int) -> bool:
        """Whether a block would exceed the limit: the allocator adds its whole size, even if a part is reserved. During
        a capture it cannot return memory."""
        if self.limit is None or allocator is self.pool or allocator.has_block(size):
            return False
        return self.default.reserved + self.pool.reserved + segment_bytes(size) > self.limit
