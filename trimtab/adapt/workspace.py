"""A shared workspace for dequantized weights, reused by all layers instead of one allocation each.

A dequantized weight is live from the kernel that writes it to the product that reads it. Both are queued on one stream,
so the next layer's kernel on that stream may overwrite it: the stream's order protects it. Each stream has its own
buffer. The lock prevents a second thread (autograd has several) from queueing work between the two; on a CPU, where
work runs immediately, it serializes the threads. Tensors saved by autograd are never in the workspace.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

Key = tuple[str, int | None, int]

_buffers: dict[Key, torch.Tensor] = {}
_locks: dict[Key, threading.Lock] = {}


def _key(device: torch.device) -> Key:
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return device.type, device.index, stream


@contextmanager
def borrow(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Iterator[torch.Tensor]:
    """Yields an uninitialized tensor [*shape] that must not be used after the `with` block.

    The buffer grows to the largest weight requested on its stream, and is not freed.

    Example:
        >>> with borrow((4, 8), torch.float32, torch.device("cpu")) as weight_NK:
        ...     weight_NK.zero_().shape
        torch.Size([4, 8])
    """
    key = _key(device)
    size = math.prod(shape) * dtype.itemsize
    with _locks.setdefault(key, threading.Lock()):
        buffer = _buffers.get(key)
        if buffer is None or buffer.numel() < size:
            del buffer
            _buffers.pop(key, None)  # frees the smaller buffer first, so that two never exist
            with torch.inference_mode(False):  # the buffer is also written in training
                _buffers[key] = buffer = torch.empty(size, dtype=torch.uint8, device=device)
        yield buffer[:size].view(dtype).view(shape)


def allocated_bytes(device: torch.device | str | None = None) -> int:
    """Bytes of the buffers, on one device or on all; for tests and measurements."""
    kind = None if device is None else torch.device(device).type
    return sum(buffer.numel() for key, buffer in _buffers.items() if kind in (None, key[0]))


def release() -> None:
    """Frees all buffers; the next product allocates a new one. Must not be called while a product runs."""
    _buffers.clear()
