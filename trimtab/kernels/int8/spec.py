"""Test cases and costs of 8-bit integer quantization; does not import torch."""

# R rows, C columns (last dimension), G values per group, S scales

from __future__ import annotations

import math
from typing import Any

IMPLS = ("reference", "triton")
SCHEMES = ("absmax", "affine")
GRANULARITIES = ("tensor", "row", "group")

SMALLEST_NORMAL = 2.0**-126
"""A scale below this is stored as 0, and its values dequantize to 0: its reciprocal would overflow."""

CASES: tuple[tuple[tuple[int, ...], int], ...] = (
    ((64, 128), 32),
    ((7, 33), 16),  # rows that end in a short group
    ((1,), 128),
    ((3, 5, 11), 4),
    ((5, 300), 128),
    ((2, 5000), 4096),  # rows longer than a tile
    ((3, 9000), 8192),
    ((0, 8), 4),
)
"""(shape, group) of the tests."""


def group_length(shape: tuple[int, ...], granularity: str, group: int) -> int:
    """Number of elements of a row that share a scale; 0 if the tensor has a single scale.

    Example:
        >>> group_length((4, 300), "row", 128), group_length((4, 300), "group", 128)
        (300, 128)
    """
    columns = shape[-1] if shape else 1
    return {"tensor": 0, "row": columns, "group": group}[granularity]


def num_scales(shape: tuple[int, ...], length: int) -> int:
    """Number of scales of a tensor whose groups have `length` elements (0: one scale). Groups never span rows.

    Example:
        >>> num_scales((4, 300), 128), num_scales((4, 300), 0)
        (12, 1)
    """
    columns = shape[-1] if shape else 1
    return 1 if length == 0 else math.prod(shape[:-1]) * -(-columns // max(length, 1))


def tensor_bytes(shape: tuple[int, ...], length: int, affine: bool) -> int:
    """Bytes of the quantized tensor: one per element, four per scale, one per zero point."""
    return math.prod(shape) + num_scales(shape, length) * (5 if affine else 4)


def bytes_moved(shape: tuple[int, ...], length: int, affine: bool, value_bytes: int = 2) -> int:
    """Bytes moved by quantizing (a tensor-wide scale reads the values twice); dequantizing moves the same otherwise."""
    passes = 2 if length == 0 else 1
    return passes * value_bytes * math.prod(shape) + tensor_bytes(shape, length, affine)


def make_inputs(
    case: tuple[tuple[int, ...], int], *, seed: int = 0, dtype: str = "fp32", device: str = "cpu"
) -> Any:
    """Values with a nonzero mean and rows of different magnitude, like activations."""
    import torch

    shape, _ = case
    generator = torch.Generator().manual_seed(seed)
    kind = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    rows = (*shape[:-1], 1)
    values = torch.randn(shape, generator=generator) + torch.randn(rows, generator=generator)
    return (values * torch.exp2(torch.rand(rows, generator=generator) * 6 - 3)).to(kind).to(device)
