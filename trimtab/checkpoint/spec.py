"""What a checkpoint costs on disk and in host memory, as arithmetic; no torch."""

from __future__ import annotations

FILE_BYTES = 256 * 2**20
"""A tensor file grows to about this size. The safetensors writer holds a file twice in memory while it
writes, so this bounds the scratch; a single larger tensor gets a file of its own."""

TENSOR_OVERHEAD = 512
"""Bytes a tensor adds besides its data: an entry in a file's header (name, offsets; about 250) and one in the
manifest (about 150)."""

STATE_BYTES = 256 * 2**10
"""Room for state.json and manifest.json: positions, counters, checksums."""


def checkpoint_bytes(parameter_bytes: int, optimizer_bytes: int, num_tensors: int = 0) -> int:
    """Upper bound for one checkpoint on disk.

    Example:
        >>> checkpoint_bytes(1_200_000_000, 1_209_375_000) / 1e9
        2.409637144
    """
    return parameter_bytes + optimizer_bytes + num_tensors * TENSOR_OVERHEAD + STATE_BYTES


def host_bytes(one_checkpoint: int, largest_tensor: int, *, num_ranks: int = 1) -> int:
    """Host memory a process needs while it saves: the copy of its share, and two files' worth of scratch.

    Example:
        >>> host_bytes(2 * 2**30, 100 * 2**20) == 2 * 2**30 + 2 * FILE_BYTES
        True
    """
    share = -(-one_checkpoint // num_ranks)
    return share + 2 * min(share, max(FILE_BYTES, largest_tensor))
