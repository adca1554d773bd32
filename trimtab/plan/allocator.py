"""A model of torch's CUDA caching allocator: predicts reserved memory for a sequence of allocations. No torch.

The rules are those of `c10/cuda/CUDACachingAllocator.cpp` and `c10/core/AllocatorConfig.h` (torch 2.11 to 2.13), for
one stream and without running out of memory:

- Sizes are rounded up to 512 bytes. Up to 1 MiB they come from the small pool, larger ones from the large pool.
- The smallest free block that is large enough is used, at the lowest address among equals. The remainder is split off:
  in the small pool and in expandable segments if it is 512 bytes or more, else if it is more than 1 MiB.
- Without a fitting block, memory is reserved. By default that is a segment of 2 MiB (small pool), 20 MiB (< 10 MiB),
  or the size rounded up to 2 MiB. With `expandable_segments:True`, which trimtab sets on Linux, each pool has one
  segment that grows by pages of 2 MiB (small pool) or 20 MiB, at the lowest address where the size fits. A free block
  before unreserved pages grows with them, and is used only if no other block fits.
- A freed block merges with free neighbours in its segment. Memory is returned to the driver only by `empty_cache`:
  whole free pages of an expandable segment, or segments without a block in use.
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
ADDRESS_SPACE = 20 * 2**40
"""Bytes of an expandable segment's address space: more than any device has."""


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
    mapped: bool = True
    """Whether memory is reserved for it; an unmapped block is free address space of an expandable segment."""
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
    unmapped: list[int] = field(default_factory=list)
    """Addresses of the unmapped blocks."""

    def allocate(self, size: int) -> tuple[_Block, int]:
        """Returns (a block of this size, bytes newly reserved for it)."""
        block, reserved = self.best_fit(size), 0
        if block is None:
            block, reserved = self._grow_segment(size) if self.expandable else self._new_segment(size)
        self._remove_free(block)
        rest = block.size - size
        if rest >= BLOCK if self.small or self.expandable else rest > SMALL_SIZE:
            self._add_free(self._split(block, size))
        block.free = False
        return block, reserved

    def release(self, block: _Block) -> None:
        """Frees a block and merges it with free neighbours."""
        block.free = True
        self._add_free(self._merge_with_neighbours(block))

    def empty_cache(self) -> int:
        """Returns free memory to the driver; returns its bytes."""
        return sum(self._return_block(self.blocks[start]) for _, start in list(self.free))

    def _return_block(self, block: _Block) -> int:
        if not self.expandable:
            if block.before is not None or block.after is not None:
                return 0
            self._remove_free(block)
            del self.blocks[block.start]
            return block.size
        start = -(-block.start // self._page) * self._page
        stop = (block.start + block.size) // self._page * self._page
        if start >= stop:
            return 0
        self._remove_free(block)
        if block.start < start:
            rest = self._split(block, start - block.start)
            self._add_free(block)
            block = rest
        if block.start + block.size > stop:
            self._add_free(self._split(block, stop - start))
        block.mapped = False
        block = self._merge_with_neighbours(block)
        bisect.insort(self.unmapped, block.start)
        return stop - start

    @property
    def _page(self) -> int:
        return SMALL_SEGMENT if self.small else LARGE_SEGMENT

    def best_fit(self, size: int) -> _Block | None:
        """Returns the free block that this size would use; None if memory has to be reserved."""
        at = bisect.bisect_left(self.free, (size, -1))
        if at == len(self.free):
            return None
        # The size of a block that can grow counts as the size to which it can.
        best = self.blocks[self.free[at][1]]
        for _, start in self.free[at + 1 :]:
            block = self.blocks[start]
            if not self.expandable or _growing_size(block) >= _growing_size(best):
                break
            best = block
        return best

    def _new_segment(self, size: int) -> tuple[_Block, int]:
        reserved = segment_bytes(size)
        start = max(self.blocks, default=0) + 2**44  # never adjacent to another segment
        block = _Block(start, reserved, free=True)
        self.blocks[start] = block
        self._add_free(block)
        return block, reserved

    def _grow_segment(self, size: int) -> tuple[_Block, int]:
        block = self._find_address_space(size)
        reserved = 0
        if not block.mapped:
            block, reserved = self._map(block, min(block.size, size))
        while block.size < size:
            rest = block.after
            assert rest is not None
            block, mapped = self._map(rest, min(size - block.size, rest.size))
            reserved += mapped
        return block, reserved

    def _find_address_space(self, size: int) -> _Block:
        """Returns the first free block of the lowest free addresses that hold this size, mapped or not."""
        if not self.blocks:
            self.blocks[0] = _Block(0, ADDRESS_SPACE, free=True, mapped=False)
            self.unmapped.append(0)
        for start in self.unmapped:
            block = self.blocks[start]
            if block.before is not None and block.before.free:
                block = block.before
            found = 0
            last: _Block | None = block
            while found < size and last is not None and last.free:
                found, last = found + last.size, last.after
            if found >= size:
                return block
        raise AssertionError("the address space is larger than any device")

    def _map(self, block: _Block, size: int) -> tuple[_Block, int]:
        """Reserves pages at the start of an unmapped block; returns the free block there, and the reserved bytes."""
        size = -(-size // self._page) * self._page
        self.unmapped.remove(block.start)
        if size < block.size:
            rest = self._split(block, size)
            rest.mapped = False
            bisect.insort(self.unmapped, rest.start)
        block.mapped = True
        block = self._merge_with_neighbours(block)
        self._add_free(block)
        return block, size

    def _split(self, block: _Block, size: int) -> _Block:
        """Splits off the rest of a block beyond `size`."""
        rest = _Block(block.start + size, block.size - size, True, True, block, block.after)
        if block.after is not None:
            block.after.before = rest
        block.size, block.after = size, rest
        self.blocks[rest.start] = rest
        return rest

    def _merge_with_neighbours(self, block: _Block) -> _Block:
        for neighbour in (block.before, block.after):
            if neighbour is None or not neighbour.free or neighbour.mapped is not block.mapped:
                continue
            if neighbour.mapped:
                self._remove_free(neighbour)
            else:
                self.unmapped.remove(neighbour.start)
            block = self._merge(*((neighbour, block) if neighbour is block.before else (block, neighbour)))
        return block

    def _merge(self, first: _Block, second: _Block) -> _Block:
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        del self.blocks[second.start]
        first.free = True
        return first

    def _add_free(self, block: _Block) -> None:
        bisect.insort(self.free, (block.size, block.start))

    def _remove_free(self, block: _Block) -> None:
        del self.free[bisect.bisect_left(self.free, (block.size, block.start))]


def _growing_size(block: _Block) -> int:
    """The size of a free block with the address space after it."""
    after = block.after
    return block.size + (after.size if after is not None and not after.mapped else 0)


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

    def has_block(self, size: int) -> bool:
        """Whether a free block holds this size, so that no memory is reserved for it."""
        size = rounded(size)
        pool = self._small if size <= SMALL_SIZE else self._large
        return pool.best_fit(size) is not None

    def free(self, number: int) -> None:
        """Frees the block with this id."""
        pool, block = self._owner.pop(number)
        self.allocated -= block.size
        pool.release(block)

    def empty_cache(self) -> None:
        """Returns free memory to the driver, as `torch.cuda.empty_cache` does.

        Example:
            >>> allocator = CachingAllocator(expandable=True)
            >>> a, b = allocator.allocate(50 * 2**20), allocator.allocate(5 * 2**20)
            >>> allocator.free(a)
            >>> allocator.empty_cache()
            >>> allocator.reserved // 2**20
            20
        """
        self.reserved -= self._small.empty_cache() + self._large.empty_cache()
