"""The model of torch's caching allocator against a simple list-based reference, on random traces."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.plan.allocator import CachingAllocator

MIB = 2**20


UNMAPPED = -1
"""The owner of address space without memory."""
ADDRESS_SPACE = 2**60


class ReferenceAllocator:
    """A straightforward version of the rules: per pool a list of segments, each a list of [size, owner, or None if
    free]."""

    def __init__(self, expandable: bool) -> None:
        self.expandable = expandable
        self.pools: dict[bool, list[list[list[int | None]]]] = {True: [], False: []}

    def allocate(self, size: int, owner: int) -> None:
        size = max((size + 511) // 512 * 512, 512)
        small = size <= MIB
        number, place = self._best_fit(size, small) or self._reserve(size, small)
        segment = self.pools[small][number]
        length = segment[place][0] or 0
        rest = length - size
        splits = rest >= 512 if small or self.expandable else rest > MIB
        segment[place : place + 1] = [[size, owner], [rest, None]] if splits else [[length, owner]]

    def _best_fit(self, size: int, small: bool) -> tuple[int, int] | None:
        fits = [
            (length, number, place)
            for number, segment in enumerate(self.pools[small])
            for place, (length, used_by) in enumerate(segment)
            if used_by is None and length is not None and length >= size
        ]
        fits.sort()
        grown = [length + self._can_grow(small, number, place) for length, number, place in fits]
        best = 0
        while best + 1 < len(fits) and self.expandable and grown[best + 1] < grown[best]:
            best += 1  # to a block that can grow less
        return fits[best][1:] if fits else None

    def _can_grow(self, small: bool, number: int, place: int) -> int:
        following = self.pools[small][number][place + 1 : place + 2]
        return (following[0][0] or 0) if following and following[0][1] == UNMAPPED else 0

    def _reserve(self, size: int, small: bool) -> tuple[int, int]:
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
            return len(segments) - 1, 0
        if not segments:
            segments.append([[ADDRESS_SPACE, UNMAPPED]])
        segment, page = segments[0], 2 * MIB if small else 20 * MIB
        place = self._address_space(segment, size)
        while True:
            free = segment[place]
            if free[1] is None and (free[0] or 0) >= size:
                return 0, place
            at = place if free[1] == UNMAPPED else place + 1
            missing = size - ((free[0] or 0) if free[1] is None else 0)
            unmapped = segment[at][0] or 0
            pages = min((missing + page - 1) // page * page, unmapped)
            segment[at : at + 1] = [[pages, None], [unmapped - pages, UNMAPPED]]
            segments[0] = segment = self._merged(segment)

    def _address_space(self, segment: list[list[int | None]], size: int) -> int:
        """The first free or unmapped block of a run that holds the size; a run begins at most one block before an
        unmapped one."""
        for place, (_, used_by) in enumerate(segment):
            if used_by != UNMAPPED:
                continue
            start = place - 1 if place and segment[place - 1][1] is None else place
            total = 0
            for length, owner in segment[start:]:
                if owner not in (None, UNMAPPED):
                    break
                total += length or 0
            if total >= size:
                return start
        raise AssertionError(size)

    @staticmethod
    def _merged(segment: list[list[int | None]]) -> list[list[int | None]]:
        merged: list[list[int | None]] = []
        for length, used_by in segment:
            if not length:
                continue
            if merged and used_by in (None, UNMAPPED) and merged[-1][1] == used_by:
                merged[-1][0] = (merged[-1][0] or 0) + length
            else:
                merged.append([length, used_by])
        return merged

    def free(self, owner: int) -> None:
        for segments in self.pools.values():
            for number, segment in enumerate(segments):
                if any(used_by == owner for _, used_by in segment):
                    freed = [[length, None if used_by == owner else used_by] for length, used_by in segment]
                    segments[number] = self._merged(freed)
                    return
        raise AssertionError(owner)

    def empty_cache(self) -> None:
        for small, segments in self.pools.items():
            if not self.expandable:
                segments[:] = [segment for segment in segments if [used for _, used in segment] != [None]]
                continue
            page = 2 * MIB if small else 20 * MIB
            for number, segment in enumerate(segments):
                cut: list[list[int | None]] = []
                address = 0
                for length, used_by in segment:
                    end = address + (length or 0)
                    first, last = -(-address // page) * page, end // page * page
                    if used_by is None and first < last:
                        cut += [[first - address, None], [last - first, UNMAPPED], [end - last, None]]
                    else:
                        cut.append([length, used_by])
                    address = end
                segments[number] = self._merged(cut)

    def total(self, *, reserved: bool) -> int:
        all_segments = (segment for segments in self.pools.values() for segment in segments)
        return sum(
            length or 0
            for segment in all_segments
            for length, used_by in segment
            if used_by != UNMAPPED and (reserved or used_by is not None)
        )


sizes = st.one_of(
    st.integers(1, 4096), st.integers(1, 2 * MIB), st.integers(MIB, 12 * MIB), st.integers(9 * MIB, 70 * MIB)
)
steps = st.lists(st.one_of(sizes, st.integers(-40, 0)), max_size=120)


@pytest.mark.parametrize("expandable", [True, False])
@settings(max_examples=120, deadline=None)
@given(trace=steps)
def test_the_model_matches_the_reference(expandable: bool, trace: list[int]) -> None:
    """A positive number allocates that many bytes, a negative number frees a live block, 0 empties the cache."""
    model, reference = CachingAllocator(expandable=expandable), ReferenceAllocator(expandable)
    live: list[int] = []
    peak = 0
    for step in trace:
        if step > 0:
            number = model.allocate(step)
            reference.allocate(step, number)
            live.append(number)
        elif step == 0:
            model.empty_cache()
            reference.empty_cache()
        elif live:
            number = live.pop(-step % len(live))
            model.free(number)
            reference.free(number)
        totals = (reference.total(reserved=False), reference.total(reserved=True))
        assert (model.allocated, model.reserved) == totals
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


def test_whole_free_pages_are_returned_and_their_addresses_used_again() -> None:
    model = CachingAllocator(expandable=True)
    numbers = [model.allocate(size * MIB) for size in (30, 50, 10, 30)]
    assert model.reserved == 120 * MIB
    model.free(numbers[1])  # bytes 30 to 80 MiB
    model.empty_cache()
    assert model.reserved == 80 * MIB  # pages from 40 to 80 MiB are returned
    assert model.has_block(10 * MIB)
    assert not model.has_block(11 * MIB)
    model.allocate(45 * MIB)
    assert model.reserved == 120 * MIB
    for number in (numbers[0], *numbers[2:]):
        model.free(number)
    model.empty_cache()
    assert model.reserved == 60 * MIB  # of pages in use


@pytest.mark.parametrize("expandable", [True, False])
def test_an_empty_allocator_returns_everything(expandable: bool) -> None:
    model = CachingAllocator(expandable=expandable)
    for number in [model.allocate(size) for size in (1, 2 * MIB, 30 * MIB)]:
        model.free(number)
    model.empty_cache()
    assert model.reserved == 0
