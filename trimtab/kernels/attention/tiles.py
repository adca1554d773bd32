"""Tile sizes of the Triton kernels: a pure function of head size, element width and capability. No torch import.

Nothing is tuned at run time: another tile sums in another order, and a result would depend on timing.
"""

from __future__ import annotations

from dataclasses import dataclass

KERNELS = ("forward", "query", "key")


@dataclass(frozen=True)
class Tiles:
    """Rows (queries · heads of a group) and keys of a tile, warps of a program, stages of its pipeline."""

    rows: int
    keys: int
    warps: int
    stages: int


def padded(head_dim: int) -> int:
    """The head size rounded up to a power of two: 80 and 96 are computed as 128.

    Example:
        >>> padded(8), padded(80), padded(256)
        (16, 128, 256)
    """
    return max(16, 1 << (head_dim - 1).bit_length())


def tiles(kernel: str, head_dim: int, width: int, capability: int, *, packed: bool = False) -> Tiles:
    """Tile sizes of a kernel's launch.

    Args:
        kernel: One of `KERNELS`.
        head_dim: 1 to 256.
        width: Bytes per element: 2 or 4.
        capability: 75, 80, 86, …; an unlisted one uses the next lower.
        packed: Whether rows contain several documents, so that a tile has few keys.

    Example:
        >>> tiles("forward", 128, 2, 90)
        Tiles(rows=64, keys=64, warps=4, stages=3)
    """
    chip = max(chip for chip in _BY_CHIP if chip <= capability)
    size = next(size for size in (64, 128, 256) if padded(head_dim) <= size)
    if packed and width < 4 and (chip, kernel, size) in _PACKED:
        return Tiles(*_PACKED[chip, kernel, size])
    table = _PLAIN if width == 4 else _BY_CHIP[chip]
    return Tiles(*table[kernel][size])


# (rows, keys, warps, stages) by padded head size. Hopper's were swept on an H200, the others fit as compiled: shared
# memory of a block is 227 KiB on 9.0 and 10.0, 163 on 8.0, 99 on 8.6, 8.9 and 12.0, 64 on 7.5.
_HOPPER = {
    "forward": {64: (64, 64, 4, 3), 128: (64, 64, 4, 3), 256: (128, 64, 8, 2)},
    "query": {64: (64, 64, 4, 3), 128: (128, 64, 8, 3), 256: (128, 32, 8, 3)},
    "key": {64: (64, 64, 4, 3), 128: (64, 64, 4, 2), 256: (64, 64, 8, 2)},
}
# Compiled for 10.0 Hopper's backward tiles for heads of 256 need more shared memory than there is, 240 and 257 KiB.
_BLACKWELL = _HOPPER | {
    "query": _HOPPER["query"] | {256: (64, 64, 8, 2)},
    "key": _HOPPER["key"] | {256: (32, 64, 8, 2)},
}
_AMPERE = {
    "forward": {64: (128, 64, 4, 3), 128: (128, 64, 8, 2), 256: (64, 64, 8, 2)},
    "query": {64: (128, 64, 8, 2), 128: (64, 64, 8, 2), 256: (64, 32, 8, 1)},
    "key": {64: (64, 128, 8, 2), 128: (64, 64, 8, 2), 256: (32, 64, 8, 1)},
}
_SMALL = {
    "forward": {64: (128, 64, 4, 2), 128: (64, 64, 4, 2), 256: (64, 32, 8, 2)},
    "query": {64: (64, 64, 4, 2), 128: (64, 32, 4, 2), 256: (32, 32, 8, 1)},
    "key": {64: (64, 64, 4, 2), 128: (32, 64, 4, 2), 256: (32, 32, 8, 1)},
}
# Triton has no tensor-core products for Turing, and fp32 is exact (no tf32) on every GPU: both run without tensor
# cores, where a thread holds its part of both operands in registers. Small tiles keep them from spilling.
_PLAIN = {
    "forward": {64: (32, 32, 4, 1), 128: (32, 32, 8, 1), 256: (32, 16, 8, 1)},
    "query": {64: (32, 16, 4, 1), 128: (32, 16, 8, 1), 256: (16, 16, 8, 1)},
    "key": {64: (16, 32, 4, 1), 128: (16, 32, 8, 1), 256: (16, 8, 8, 1)},
}
_BY_CHIP = {75: _PLAIN, 80: _AMPERE, 86: _SMALL, 90: _HOPPER, 100: _BLACKWELL, 120: _SMALL}
_PACKED = {(90, "query", 128): (64, 64, 4, 2), (100, "query", 128): (64, 64, 4, 2)}
"""Exceptions for packed rows."""
