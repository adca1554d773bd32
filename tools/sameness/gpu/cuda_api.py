"""Emulates torch.cuda of a machine with an H200, with streams and graphs.

Stream operations are recorded, so that a missing synchronization is a difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch

from tools.sameness.dry import pretended_gpu
from tools.sameness.gpu.device import CUDA
from tools.sameness.gpu.log import Log

IGNORED = (
    "init",
    "empty_cache",
    "reset_peak_memory_stats",
    "set_per_process_memory_fraction",
)
"""Functions of torch.cuda that do nothing here."""


class Streams:
    """Replacements for torch.cuda's streams, events and graphs, which write to a log."""

    def __init__(self, log: Log) -> None:
        self.log, self.count, self.events = log, 0, 0

    def make(self, *_: Any, **__: Any) -> Stream:
        """A new stream."""
        self.count += 1
        return Stream(self, self.count)

    def current(self, *_: Any) -> Stream:
        """The stream to which operators are submitted."""
        return Stream(self, self.log.stream)

    def event(self, *_: Any, **__: Any) -> Event:
        """A new event."""
        self.events += 1
        return Event(self, self.events)

    @contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        """Queues operators on a stream."""
        before = self.log.stream
        self.log.stream = before if stream is None else stream.number
        try:
            yield
        finally:
            self.log.stream = before

    @contextmanager
    def capture(
        self, graph: Graph, pool: Any = None, stream: Stream | None = None, **_: Any
    ) -> Iterator[None]:
        """Operators within are captured. They are computed as well, unlike on a GPU, where a graph only runs later."""
        self.log.add("graph begins", {})
        with self.on(stream):
            yield
        self.log.add("graph ends", {})

    def graph(self, *_: Any, **__: Any) -> Graph:
        """A new graph."""
        return Graph(self)


class Stream:
    """A stream; number 0 is the default one."""

    device = CUDA

    def __init__(self, streams: Streams, number: int) -> None:
        self.streams, self.number, self.cuda_stream = streams, number, number

    def wait_stream(self, other: Stream) -> None:
        """Recorded."""
        self._record("waits for stream", other.number)

    def wait_event(self, event: Event) -> None:
        """Recorded."""
        self._record("waits for event", event.number)

    def record_event(self, event: Event | None = None) -> Event:
        """Recorded."""
        event = event or self.streams.event()
        self._record("records event", event.number)
        return event

    def synchronize(self) -> None:
        """Recorded."""
        self._record("synchronizes", "")

    def _record(self, what: str, value: Any) -> None:
        self.streams.log.add(f"stream {what}", {"stream": self.number, "value": value})


class Event:
    """An event that is always complete."""

    def __init__(self, streams: Streams, number: int) -> None:
        self.streams, self.number = streams, number

    def record(self, stream: Stream | None = None) -> None:
        """Recorded."""
        (stream or self.streams.current()).record_event(self)

    def wait(self, stream: Stream | None = None) -> None:
        """Recorded."""
        (stream or self.streams.current()).wait_event(self)

    def query(self) -> bool:
        """Returns True: all work is complete."""
        return True

    def synchronize(self) -> None:
        """Recorded."""
        self.streams.log.add("event synchronizes", {"value": self.number})


class Graph:
    """A CUDA graph; a replay is one entry."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams

    def replay(self) -> None:
        """Recorded."""
        self.streams.log.add("graph replay", {})


class Runtime:
    """torch.cuda.cudart(): registering host memory succeeds."""

    def cudaHostRegister(self, *_: Any) -> int:
        """Success."""
        return 0

    def cudaHostUnregister(self, *_: Any) -> int:
        """Success."""
        return 0


def _nothing(*_: Any, **__: Any) -> None:
    """Replaces functions without an effect here."""


@contextmanager
def emulated_cuda_api(log: Log) -> Iterator[None]:
    """torch.cuda without a GPU."""
    streams = Streams(log)
    doubles: dict[str, Any] = {
        "current_device": lambda: 0,
        "device": lambda *_: nullcontext(),
        "is_bf16_supported": lambda *_: True,
        "synchronize": lambda *_: log.add("synchronize", {}),
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "max_memory_reserved": lambda *_: 0,
        "Stream": streams.make,
        "current_stream": streams.current,
        "stream": streams.on,
        "Event": streams.event,
        "CUDAGraph": streams.graph,
        "graph": streams.capture,
        "graph_pool_handle": lambda: (0, 0),
        "cudart": Runtime,
        **dict.fromkeys(IGNORED, _nothing),
    }
    with ExitStack() as stack:
        stack.enter_context(pretended_gpu())
        for name, double in doubles.items():
            stack.enter_context(patch.object(torch.cuda, name, double))
        for name in ("_cuda_clearCublasWorkspaces", "_accelerator_setAllocatorSettings"):
            stack.enter_context(patch.object(torch._C, name, _nothing, create=True))
        yield
