"""A model of torch's CUDA caching allocator: predicts reserved memory for a sequence of allocations. No torch.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` and `c10/core/AllocatorConfig.h` (torch 2.11 to 2.13), for
one stream and without running out of memory:

- Sizes are rounded up to 512 bytes. Up to 1 MiB they come from the small pool, larger ones from the large pool.
- The smallest free block that is large enough is used, at the lowest address among equals. The remainder is split off:
  in the small pool and in expandable segments if it is 512 bytes or more, else if it is more than 1 MiB.
- Without a fitting block, memory is reserved. By default that is a segment of 2 MiB (small pool), 20 MiB (< 10 MiB),
  or the size rounded up to 2 MiB. With `expandable_segments:True`, which trimtab sets on Linux, each pool has one
  segment that grows at its end by pages of 2 MiB (small pool) or 20 MiB. A free block at the end grows with it, and is
  used only if no other block fits.
- A freed block merges with free neighbours in its segment. No memory is returned to the driver.
- CUDA graphs use a private pool with the same rules: a second allocator in this model.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

BLOCK = 512
SMALL_SIZE = 2**20
SMALL_SEGMENT = 2 * 2**20
LARGE_SEGMENT = 20 * 2**20
MIN_OWN_SEGMENT = 10 * 2**20
ROUND_LARGE = 2 * 2**20


def rounded(size: int) -> int:
    """Bytes of the block that serves an allocation.

    Example:
        >>> rounded(1), rounded(513)
        (512, 1024)
    """
    return max(-(-size // BLOCK) * BLOCK, BLOCK)


def segment_bytes(size: int) -> int:
    """Bytes of the segment reserved for a block of this size, if segments are not expandable.

    Example:
        >>> [segment_bytes(size) // 2**20 for size in (512, 2 * 2**20, 11 * 2**20 + 512)]
        [2, 20, 12]
    """
    if size <= SMALL_SIZE:
        return SMALL_SEGMENT
    if size < MIN_OWN_SEGMENT:
        return LARGE_SEGMENT
    return -(-size // ROUND_LARGE) * ROUND_LARGE


@dataclass(eq=False, slots=True)
class _Block:
    start: int
    size: int
    free: bool
    before: _Block | None = None
    after: _Block | None = None


@dataclass
class _Pool:
    """Free blocks by size and address."""

    small: bool
    expandable: bool
    free: list[tuple[int, int]] = field(default_factory=list)
    blocks: dict[int, _Block] = field(default_factory=dict)
    """By address; segments are far apart."""
    end: _Block | None = None
    """The last block of the expandable segment."""

    def allocate(self, size: int) -> tuple[_Block, int]:
        """Returns (a block of this size, bytes newly reserved for it)."""
        block, reserved = self._best_fit(size), 0
        if block is None:
            block, reserved = self._grow_segment(size) if self.expandable else self._new_segment(size)
        self._remove_free(block)
        rest = block.size - size
        if rest >= BLOCK if self.small or self.expandable else rest > SMALL_SIZE:
            self._split(block, size)
        block.free = False
        return block, reserved

    def release(self, block: _Block) -> None:
        """Frees a block and merges it with free neighbours."""
        block.free = True
        for neighbour in (block.before, block.after):
            if neighbour is not None and neighbour.free:
                self._remove_free(neighbour)
                block = self._merge(
                    *((neighbour, block) if neighbour is block.before else (block, neighbour))
                )
        self._add_free(block)

    def _best_fit(self, size: int) -> _Block | None:
        at = bisect.bisect_left(self.free, (size, -1))
        last = None
        for _, start in self.free[at : at + 2]:
            block = self.blocks[start]
            if block is not self.end:
                return block
            last = block
        return last

    def _new_segment(self, size: int) -> tuple[_Block, int]:
        reserved = segment_bytes(size)
        start = max(self.blocks, default=0) + 2**44  # never adjacent to another segment
        block = _Block(start, reserved, free=True)
        self.blocks[start] = block
        self._add_free(block)
        return block, reserved

    def _grow_segment(self, size: int) -> tuple[_Block, int]:
        end = self.end
        available = end.size if end is not None and end.free else 0
        page = SMALL_SEGMENT if self.small else LARGE_SEGMENT
        reserved = -(-(size - available) // page) * page
        if end is not None and end.free:
            self._remove_free(end)
            end.size += reserved
        else:
            end = _Block(0 if end is None else end.start + end.size, reserved, free=True, before=end)
            if end.before is not None:
                end.before.after = end
            self.blocks[end.start] = end
        self.end = end
        self._add_free(end)
        return end, reserved

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.start + size, block.size - size, True, block, block.after)
        if block.after is not None:
            block.after.before = rest
        block.size, block.after = size, rest
        self.blocks[rest.start] = rest
        self._add_free(rest)
        if block is self.end:
            self.end = rest

    def _merge(self, first: _Block, second: _Block) -> _Block:
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        del self.blocks[second.start]
        if second is self.end:
            self.end = first
        first.free = True
        return first

    def _add_free(self, block: _Block) -> None:
        bisect.insort(self.free, (block.size, block.start))

    def _remove_free(self, block: _Block) -> None:
        del self.free[bisect.bisect_left(self.free, (block.size, block.start))]


class CachingAllocator:
    """The allocator of one stream or of one CUDA graph pool.

    Args:
        expandable: whether segments are expandable.

    Example:
        >>> allocator = CachingAllocator(expandable=True)
        >>> a = allocator.allocate(30 * 2**20)
        >>> b = allocator.allocate(5 * 2**20)
        >>> allocator.free(a)
        >>> allocator.allocated // 2**20, allocator.reserved // 2**20, allocator.peak_allocated // 2**20
        (5, 40, 35)
    """

    def __init__(self, *, expandable: bool) -> None:
        self._small, self._large = _Pool(True, expandable), _Pool(False, expandable)
        self._owner: dict[int, tuple[_Pool, _Block]] = {}
        self._next = 0
        self.allocated = self.reserved = 0
        self.peak_allocated = 0

    def allocate(self, size: int) -> int:
        """Allocates a block and returns its id, for `free`."""
        size = rounded(size)
        pool = self._small if size <= SMALL_SIZE else self._large
        block, reserved = pool.allocate(size)
        self.reserved += reserved
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self._next += 1
        self._owner[self._next] = (pool, block)
        return self._next

    def free(self, number: int) -> None:
        """Frees the block with this id."""
        pool, block = self._owner.pop(number)
        self.allocated -= block.size
        pool.release(block)
