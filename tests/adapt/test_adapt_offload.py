"""Pinned host buffers of activation offloading: which are reused and which are unpinned. No GPU."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from trimtab.adapt import offload
from trimtab.adapt.offload import HostStore


@dataclass
class Buffer:
    num_bytes: int


@dataclass
class Event:
    waited: list[str] = field(default_factory=list)

    def synchronize(self) -> None:
        self.waited.append("host")


class StreamlessStore(HostStore):
    """Without the streams of a device."""

    def __init__(self) -> None:
        self._free, self._layer, self.host_bytes = [], None, 0


def step(store: StreamlessStore, *sizes: int) -> None:
    """A forward pass that offloads tensors of these sizes and a backward pass that releases them."""
    taken = [store._acquire_buffer(size) for size in sizes]
    for buffer in reversed(taken):
        store._release_buffer(buffer, [])


def test_sequences_that_grow_pin_no_more_than_the_longest_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resume within an epoch of group_by_length has short microbatches before long ones."""
    monkeypatch.setattr(offload, "_Pinned", Buffer)
    store = StreamlessStore()
    for length in (1, 3, 2, 4, 1, 5, 5, 2):
        step(store, *[100 * length, 40 * length] * 3)
    assert store.host_bytes == 3 * (500 + 200)
    assert store.host_bytes == sum(buffer.num_bytes for buffer, _ in store._free)


def test_a_buffer_is_not_unpinned_while_a_copy_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "_Pinned", Buffer)
    store, used = StreamlessStore(), Event()
    store._release_buffer(store._acquire_buffer(10), [used])  # type: ignore[list-item]
    assert store._acquire_buffer(20).num_bytes == 20
    assert used.waited == ["host"]
    assert store.host_bytes == 20
