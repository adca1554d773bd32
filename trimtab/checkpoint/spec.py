"""Size of a checkpoint on disk and host memory needed to save it, by arithmetic; no torch."""

from __future__ import annotations

FILE_BYTES = 256 * 2**20
"""Approximate maximum size of a tensor file. The safetensors writer needs twice the file's size in host memory, so this
bounds the temporary buffers; a single larger tensor gets a separate file."""

TENSOR_OVERHEAD = 512
"""Bytes per tensor in addition to its data: an entry in a file's header (name, offsets; about 250) and one in the
manifest (about 150)."""

STATE_BYTES = 256 * 2**10
"""Upper bound for state.json and manifest.json: positions, counters, checksums."""


def checkpoint_bytes(parameter_bytes: int, optimizer_bytes: int, num_tensors: int = 0) -> int:
    """Upper bound for one checkpoint on disk.

    Example:
        >>> checkpoint_bytes(1_200_000_000, 1_209_375_000) / 1e9
        2.409637144
    """
    return parameter_bytes + optimizer_bytes + num_tensors * TENSOR_OVERHEAD + STATE_BYTES


def host_bytes(one_checkpoint: int, largest_tensor: int, *, num_ranks: int = 1) -> int:
    """Host memory that a process needs to save: the copy of its share, and temporary buffers of two files.

    Example:
        >>> host_bytes(2 * 2**30, 100 * 2**20) == 2 * 2**30 + 2 * FILE_BYTES
        True
    """
    share = -(-one_checkpoint // num_ranks)
    return share + 2 * min(share, max(FILE_BYTES, largest_tensor))
