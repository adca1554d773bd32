"""One buffer for dequantized weights, used by all layers in turn instead of a fresh allocation each.

A dequantized weight lives from the kernel that writes it to the product that reads it. Both are queued on one stream,
so the next layer's kernel on that stream may overwrite it: the device keeps the order. Another stream has a buffer of
its own. The lock keeps a second thread from queueing between the two (autograd's threads are such ones); on a CPU,
where work is done when it is queued, it keeps the threads apart altogether. Nothing that autograd saves lies in here.
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
def lend(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Iterator[torch.Tensor]:
    """An uninitialized tensor [*shape] for as long as the block lasts; it may not be kept beyond.

    The buffer grows to the largest weight that was asked for on its stream, and stays.

    Example:
        >>> with lend((4, 8), torch.float32, torch.device("cpu")) as weight_NK:
        ...     weight_NK.zero_().shape
        torch.Size([4, 8])
    """
    key = _key(device)
    size = math.prod(shape) * dtype.itemsize
    with _locks.setdefault(key, threading.Lock()):
        buffer = _buffers.get(key)
        if buffer is None or buffer.numel() < size:
            del buffer
            _buffers.pop(key, None)  # the smaller one first, so that both never exist at once
            with torch.inference_mode(False):  # it will be written to in training as well
                _buffers[key] = buffer = torch.empty(size, dtype=torch.uint8, device=device)
        yield buffer[:size].view(dtype).view(shape)


def held_bytes(device: torch.device | str | None = None) -> int:
    """Bytes that the buffers hold now, on one device or on all; for tests and measurements."""
    kind = None if device is None else torch.device(device).type
    return sum(buffer.numel() for key, buffer in _buffers.items() if kind in (None, key[0]))


def release() -> None:
    """Gives all buffers back; the next product asks for a new one. Not while a product is running."""
    _buffers.clear()
