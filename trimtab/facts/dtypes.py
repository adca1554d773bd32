"""Number formats by name, with their width in bytes."""

from __future__ import annotations

BYTES: dict[str, int] = {
    "fp64": 8,
    "fp32": 4,
    "bf16": 2,
    "fp16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "uint8": 1,
    "int8": 1,
    "bool": 1,
}

TORCH_NAMES: dict[str, str] = {
    "fp64": "float64",
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
}
"""Ours to torch's: `getattr(torch, TORCH_NAMES["bf16"])`."""


def nbytes(name: str, count: int) -> int:
    """Bytes of `count` numbers.

    Example:
        >>> nbytes("bf16", 10)
        20
    """
    return BYTES[name] * count
