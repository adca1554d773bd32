"""Dtypes by name, with their width in bytes."""

from __future__ import annotations

from typing import Any

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


def dtype_alias(name: Any) -> Any:
    """Our name of a format that is written as torch writes it; anything else as it is.

    Example:
        >>> dtype_alias("bfloat16"), dtype_alias("torch.float16"), dtype_alias("fp32")
        ('bf16', 'fp16', 'fp32')
    """
    text = name if isinstance(name, str) else str(name) if type(name).__name__ == "dtype" else ""
    ours = {theirs: own for own, theirs in TORCH_NAMES.items()}
    return ours.get(text.removeprefix("torch."), name)
