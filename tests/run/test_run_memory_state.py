"""The memory state from an allocator's error message and snapshot."""

from __future__ import annotations

import errno

import pytest
import torch
from full_memory import GIB, MESSAGE

from trimtab.facts.errors import is_out_of_memory
from trimtab.run import memory_state
from trimtab.run.gpu_processes import GpuProcess
from trimtab.run.memory_state import largest_free_block, parse_message


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried"
        ),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
)
def test_errors_that_mean_out_of_memory(error: BaseException) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("The size of tensor a (3) must match"),
        OSError(errno.ENOSPC, "No space left on device"),
        ValueError("can't allocate memory"),
    ],
)
def test_errors_that_do_not_mean_out_of_memory(error: BaseException) -> None:
    assert not is_out_of_memory(error)


def test_the_cuda_allocators_message_is_parsed() -> None:
    state = parse_message(torch.OutOfMemoryError(MESSAGE))
    assert state.on_gpu
    assert (state.requested, state.allocated, state.reserved) == (2 * GIB, 15 * GIB, 16.25 * GIB)
    assert (state.free, state.total, state.process) == (1.5 * GIB, 22 * GIB, 17.25 * GIB)
    assert state.fragmented == 1.25 * GIB
    assert state.others == (GpuProcess(4711, "process", int(3.25 * GIB)),)


def test_private_pools_and_a_memory_limit_are_read() -> None:
    """As with CUDA graphs, and with `memory_limit`, which caps torch's allocator."""
    said = MESSAGE.replace(
        "is allocated by PyTorch, and",
        "is allocated by PyTorch, with 3.00 GiB allocated in private pools (e.g., CUDA Graphs), and",
    ).replace("Of the allocated", "18.00 GiB allowed; Of the allocated")
    state = parse_message(torch.OutOfMemoryError(said))
    assert (state.allocated, state.reserved, state.total) == (15 * GIB, 16.25 * GIB, 18 * GIB)


def test_a_message_without_sizes_yields_none() -> None:
    state = parse_message(RuntimeError("CUDA error: out of memory"))
    assert state.on_gpu
    assert (state.requested, state.allocated, state.fragmented) == (None, None, None)


def test_the_hosts_message_names_the_bytes() -> None:
    text = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12"
    state = memory_state.memory_state(RuntimeError(text))
    assert not state.on_gpu
    assert state.requested == 4096
    assert state.process is not None
    assert state.free is not None
    assert state.total is not None
    assert 0 < state.process < state.total
    assert 0 < state.free <= state.total


def test_the_largest_free_block_excludes_allocated_blocks() -> None:
    def block(size: int, state: str) -> dict[str, object]:
        return {"size": size, "state": state}

    segments = [
        {"blocks": [block(900, "active_allocated"), block(100, "inactive")]},
        {"blocks": [block(300, "inactive"), block(700, "active_pending_free")]},
    ]
    assert largest_free_block(segments) == 300
    assert largest_free_block([]) is None
