"""The model of torch's caching allocator against a simple list-based reference, on random traces."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.plan.allocator import CachingAllocator

MIB = 2**20


class ReferenceAllocator:
    """A straightforward version of the rules: per pool a list of segments, each a list of [size, owner or None]."""

    def __init__(self, expandable: bool) -> None:
        self.expandable = expandable
        self.pools: dict[bool, list[list[list[int | None]]]] = {True: [], False: []}
        self.reserved = 0

    def allocate(self, size: int, owner: int) -> None:
        size = max((size + 511) // 512 * 512, 512)
        small = size <= MIB
        segments = self.pools[small]
        fits = []
        for number, segment in enumerate(segments):
            for place, (length, used_by) in enumerate(segment):
                if used_by is None and length is not None and length >= size:
                    at_end = self.expandable and place == len(segment) - 1
                    fits.append((at_end, length, number, place))
        if not fits:
            fits = [self._reserve(size, small)]
        _, length, number, place = min(fits)
        rest = length - size
        segment = segments[number]
        splits = rest >= 512 if small or self.expandable else rest > MIB
        segment[place : place + 1] = [[size, owner], [rest, None]] if splits else [[length, owner]]

    def _reserve(self, size: int, small: bool) -> tuple[bool, int, int, int]:
        segments = self.pools[small]
        if not self.expandable:
            length = (
                2 * MIB
                if small
                else 20 * MIB
                if size < 10 * MIB
                else (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
            )
            segments.append([[length, None]])
            self.reserved += length
            return False, length, len(segments) - 1, 0
        if not segments:
            segments.append([])
        segment, page = segments[0], 2 * MIB if small else 20 * MIB
        if not segment or segment[-1][1] is not None:
            segment.append([0, None])
        available = segment[-1][0] or 0
        pages = (size - available + page - 1) // page * page
        segment[-1][0] = available + pages
        self.reserved += pages
        return True, available + pages, 0, len(segment) - 1

    def free(self, owner: int) -> None:
        for segments in self.pools.values():
            for number, segment in enumerate(segments):
                if any(used_by == owner for _, used_by in segment):
                    merged: list[list[int | None]] = []
                    for length, used_by in segment:
                        used_by = None if used_by == owner else used_by
                        if merged and used_by is None and merged[-1][1] is None:
                            merged[-1][0] = (merged[-1][0] or 0) + (length or 0)
                        else:
                            merged.append([length, used_by])
                    segments[number] = merged
                    return
        raise AssertionError(owner)

    @property
    def allocated(self) -> int:
        all_segments = (segment for segments in self.pools.values() for segment in segments)
        return sum(
            length or 0 for segment in all_segments for length, used_by in segment if used_by is not None
        )


sizes = st.one_of(
    st.integers(1, 4096), st.integers(1, 2 * MIB), st.integers(MIB, 12 * MIB), st.integers(9 * MIB, 70 * MIB)
)
steps = st.lists(st.one_of(sizes, st.integers(-40, -1)), max_size=120)


@pytest.mark.parametrize("expandable", [True, False])
@settings(max_examples=120, deadline=None)
@given(trace=steps)
def test_the_model_matches_the_reference(expandable: bool, trace: list[int]) -> None:
    """A positive number allocates that many bytes; a negative number frees a live block."""
    model, reference = CachingAllocator(expandable=expandable), ReferenceAllocator(expandable)
    live: list[int] = []
    peak = 0
    for step in trace:
        if step > 0:
            number = model.allocate(step)
            reference.allocate(step, number)
            live.append(number)
        elif live:
            number = live.pop(-step % len(live))
            model.free(number)
            reference.free(number)
        assert (model.allocated, model.reserved) == (reference.allocated, reference.reserved)
        assert model.allocated <= model.reserved
        peak = max(peak, model.allocated)
    assert model.peak_allocated == peak


def test_fixed_segments() -> None:
    model = CachingAllocator(expandable=False)
    numbers = [model.allocate(600 * 1024) for _ in range(4)]  # three blocks of 600 KiB fit in 2 MiB
    assert model.reserved == 4 * MIB
    model.allocate(3 * MIB)
    assert model.reserved == 24 * MIB
    model.allocate(16 * MIB)  # fits in the rest of 20 MiB
    assert model.reserved == 24 * MIB
    for number in numbers:
        model.free(number)
    assert model.reserved == 24 * MIB


def test_an_expandable_segment_reuses_its_free_end() -> None:
    model = CachingAllocator(expandable=True)
    first, last = model.allocate(30 * MIB), model.allocate(25 * MIB)
    assert model.reserved == 60 * MIB
    model.free(last)
    model.allocate(40 * MIB)  # 30 are free at the end: one more page
    assert model.reserved == 80 * MIB
    model.free(first)
    model.allocate(29 * MIB)
    assert model.reserved == 80 * MIB


def test_a_hole_is_used_before_the_free_end() -> None:
    model = CachingAllocator(expandable=True)
    hole, _, end = (model.allocate(18 * MIB), model.allocate(2 * MIB), model.allocate(14 * MIB))
    model.free(hole)
    model.free(end)
    model.allocate(12 * MIB)  # the end has 20 MiB, the hole 18
    model.allocate(20 * MIB)
    assert model.reserved == 40 * MIB
