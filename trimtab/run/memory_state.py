"""Memory that was allocated, reserved and free when an allocation failed, and that of other processes."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from trimtab.facts.devices import host_memory
from trimtab.facts.units import parse_bytes
from trimtab.run.gpu_processes import GpuProcess, other_processes
from trimtab.trainer.memory import process_bytes

_CUDA = re.compile(r"CUDA|CUBLAS|CUDNN")
_SIZE = r"(\d+(?:\.\d+)? (?:[KMGT]iB|bytes))"
# The wording of c10/cuda/CUDACachingAllocator.cpp, torch 2.11 to 2.13.
_REQUESTED = re.compile(rf"Tried to allocate {_SIZE}")
_CAPACITY = re.compile(rf"has a total capacity of {_SIZE} of which {_SIZE} is free")
_ALLOWED = re.compile(rf"{_SIZE} allowed")
_OWN = re.compile(rf"this process has {_SIZE} memory in use")
_ALLOCATED = re.compile(rf"Of the allocated memory {_SIZE} is allocated by PyTorch")
_UNALLOCATED = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")
_OTHERS = re.compile(rf"Process (\d+) has {_SIZE} memory in use")
_HOST_REQUESTED = re.compile(r"tried to allocate (\d+) bytes")


@dataclass(frozen=True)
class MemoryState:
    """Memory of a device at the moment an allocation failed; unknown values are None."""

    device: str
    """The GPU's name, or `host`."""
    requested: int | None = None
    """Bytes of the allocation that failed."""
    allocated: int | None = None
    """Bytes in tensors, as torch's allocator counts them."""
    reserved: int | None = None
    """Bytes that torch's caching allocator has reserved on the GPU."""
    process: int | None = None
    """Memory of this process in bytes: on a GPU including the CUDA context, on the host resident memory."""
    free: int | None = None
    total: int | None = None
    """Capacity of the device in bytes, or this process's limit where there is one."""
    address_space: int | None = None
    """Limit of the process's address space in bytes, where there is one (`ulimit -v`)."""
    largest_free_block: int | None = None
    """The largest free block of the reserved memory, in bytes."""
    others: tuple[GpuProcess, ...] = ()
    """Other processes on the GPU, the largest first."""

    @property
    def fragmented(self) -> int | None:
        """Bytes that are reserved but not allocated, in blocks that could not serve the request."""
        if self.reserved is None or self.allocated is None:
            return None
        return max(0, self.reserved - self.allocated)

    @property
    def on_gpu(self) -> bool:
        """Whether the GPU ran out of memory, rather than the host."""
        return self.device != "host"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {**asdict(self), "fragmented": self.fragmented}


def parse_message(error: BaseException) -> MemoryState:
    """Parses the sizes in torch's out-of-memory message.

    Example:
        >>> text = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 22.00 GiB of which "
        >>> state = parse_message(torch.OutOfMemoryError(text + "1.50 GiB is free."))
        >>> state.requested == 2 * 2**30, state.free == 3 * 2**29
        (True, True)
    """
    text = str(error)
    if not (isinstance(error, torch.OutOfMemoryError) or _CUDA.search(text)):
        found = _HOST_REQUESTED.search(text)
        return MemoryState("host", requested=int(found[1]) if found else None)
    capacity, allocated = _CAPACITY.search(text), _first(_ALLOCATED, text)
    unallocated, total = _first(_UNALLOCATED, text), _bytes(capacity[1]) if capacity else None
    others = [GpuProcess(int(pid), "process", _bytes(size)) for pid, size in _OTHERS.findall(text)]
    return MemoryState(
        "GPU",
        requested=_first(_REQUESTED, text),
        allocated=allocated,
        reserved=None if allocated is None or unallocated is None else allocated + unallocated,
        process=_first(_OWN, text),
        free=_bytes(capacity[2]) if capacity else None,
        total=_first(_ALLOWED, text) or total,
        others=tuple(others),
    )


def largest_free_block(segments: Iterable[Mapping[str, Any]]) -> int | None:
    """The largest free block of torch's allocator, from `torch.cuda.memory_snapshot()`; None if there is none.

    Example:
        >>> blocks = [{"size": 512, "state": "active_allocated"}, {"size": 256, "state": "inactive"}]
        >>> largest_free_block([{"blocks": blocks}])
        256
    """
    blocks = (block for segment in segments for block in segment.get("blocks", ()))
    return max((int(block["size"]) for block in blocks if block.get("state") == "inactive"), default=None)


def memory_state(error: BaseException) -> MemoryState:
    """Memory at the failure, from torch's message, which was written at that moment; the rest from the allocator."""
    state = parse_message(error)
    if not state.on_gpu:
        total, available = host_memory()
        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        return replace(
            state,
            process=process_bytes() or None,
            free=available,
            total=total,
            address_space=None if limit == resource.RLIM_INFINITY else limit,
        )
    if not torch.cuda.is_initialized():
        return state
    index = torch.cuda.current_device()
    state = replace(state, device=torch.cuda.get_device_name(index))
    with suppress(RuntimeError):  # after some CUDA errors every further call fails
        free, total = torch.cuda.mem_get_info(index)
        state = replace(
            state,
            allocated=state.allocated or torch.cuda.memory_allocated(index),
            reserved=state.reserved or torch.cuda.memory_reserved(index),
            free=free if state.free is None else state.free,
            total=state.total or total,
            largest_free_block=largest_free_block(torch.cuda.memory_snapshot()),
            others=other_processes(index) or state.others,
        )
    return state


def _first(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return _bytes(found[1]) if found else None


def _bytes(text: str) -> int | None:
    return int(text.split()[0]) if text.endswith("bytes") else parse_bytes(text.replace(" ", ""))
