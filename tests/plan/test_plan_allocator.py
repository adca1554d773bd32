"""The model of torch's caching allocator against a second one that searches a list of bytes, on random traces."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.plan.allocator import CachingAllocator

MIB = 2**20


class ListedAllocator:
    """The same rules written the plain way: per pool a list of segments, each a list of [size, owner or None]."""

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
            for place, (room, who) in enumerate(segment):
                if who is None and room is not None and room >= size:
                    at_end = self.expandable and place == len(segment) - 1
                    fits.append((at_end, room, number, place))
        if not fits:
            fits = [self._more(size, small)]
        _, room, number, place = min(fits)
        rest = room - size
        segment = segments[number]
        splits = rest >= 512 if small or self.expandable else rest > MIB
        segment[place : place + 1] = [[size, owner], [rest, None]] if splits else [[room, owner]]

    def _more(self, size: int, small: bool) -> tuple[bool, int, int, int]:
        segments = self.pools[small]
        if not self.expandable:
            room = (
                2 * MIB
                if small
                else 20 * MIB
                if size < 10 * MIB
                else (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
            )
            segments.append([[room, None]])
            self.reserved += room
            return False, room, len(segments) - 1, 0
        if not segments:
            segments.append([])
        segment, page = segments[0], 2 * MIB if small else 20 * MIB
        if not segment or segment[-1][1] is not None:
            segment.append([0, None])
        there = segment[-1][0] or 0
        pages = (size - there + page - 1) // page * page
        segment[-1][0] = there + pages
        self.reserved += pages
        return True, there + pages, 0, len(segment) - 1

    def free(self, owner: int) -> None:
        for segments in self.pools.values():
            for number, segment in enumerate(segments):
                if any(who == owner for _, who in segment):
                    merged: list[list[int | None]] = []
                    for room, who in segment:
                        who = None if who == owner else who
                        if merged and who is None and merged[-1][1] is None:
                            merged[-1][0] = (merged[-1][0] or 0) + (room or 0)
                        else:
                            merged.append([room, who])
                    segments[number] = merged
                    return
        raise AssertionError(owner)

    @property
    def allocated(self) -> int:
        found = (segment for segments in self.pools.values() for segment in segments)
        return sum(room or 0 for segment in found for room, who in segment if who is not None)


sizes = st.one_of(
    st.integers(1, 4096), st.integers(1, 2 * MIB), st.integers(MIB, 12 * MIB), st.integers(9 * MIB, 70 * MIB)
)
steps = st.lists(st.one_of(sizes, st.integers(-40, -1)), max_size=120)


@pytest.mark.parametrize("expandable", [True, False])
@settings(max_examples=120, deadline=None)
@given(trace=steps)
def test_the_model_is_the_plain_one(expandable: bool, trace: list[int]) -> None:
    """A positive number allocates so many bytes, a negative one frees one of those that are there."""
    model, plain = CachingAllocator(expandable=expandable), ListedAllocator(expandable)
    alive: list[int] = []
    most = 0
    for step in trace:
        if step > 0:
            number = model.allocate(step)
            plain.allocate(step, number)
            alive.append(number)
        elif alive:
            number = alive.pop(-step % len(alive))
            model.free(number)
            plain.free(number)
        assert (model.allocated, model.reserved) == (plain.allocated, plain.reserved)
        assert model.allocated <= model.reserved
        most = max(most, model.allocated)
    assert model.peak_allocated == most


def test_segments_that_do_not_grow() -> None:
    model = CachingAllocator(expandable=False)
    numbers = [model.allocate(600 * 1024) for _ in range(4)]  # three of 600 KiB fit 2 MiB
    assert model.reserved == 4 * MIB
    model.allocate(3 * MIB)
    assert model.reserved == 24 * MIB
    model.allocate(16 * MIB)  # what is left of 20 MiB
    assert model.reserved == 24 * MIB
    for number in numbers:
        model.free(number)
    assert model.reserved == 24 * MIB


def test_a_segment_that_grows_uses_what_is_free_at_its_end() -> None:
    model = CachingAllocator(expandable=True)
    first, last = model.allocate(30 * MIB), model.allocate(25 * MIB)
    assert model.reserved == 60 * MIB
    model.free(last)
    model.allocate(40 * MIB)  # 30 are free at the end: one more page
    assert model.reserved == 80 * MIB
    model.free(first)
    model.allocate(29 * MIB)
    assert model.reserved == 80 * MIB


def test_a_hole_is_taken_before_the_free_end() -> None:
    model = CachingAllocator(expandable=True)
    hole, _, end = (model.allocate(18 * MIB), model.allocate(2 * MIB), model.allocate(14 * MIB))
    model.free(hole)
    model.free(end)
    model.allocate(12 * MIB)  # the end has 20 MiB, the hole 18; without the rule the smaller one is taken too
    model.allocate(20 * MIB)
    assert model.reserved == 40 * MIB
