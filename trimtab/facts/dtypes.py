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
"""Maps trimtab's names to torch's: `getattr(torch, TORCH_NAMES["bf16"])`."""


def nbytes(name: str, count: int) -> int:
    """Returns the size in bytes of `count` elements.

    Example:
        >>> nbytes("bf16", 10)
        20
    """
    return BYTES[name] * count


def dtype_alias(name: Any) -> Any:
    """Converts torch's name of a dtype, or the dtype itself, to trimtab's; returns anything else unchanged.

    Example:
        >>> dtype_alias("bfloat16"), dtype_alias("torch.float16"), dtype_alias("fp32")
        ('bf16', 'fp16', 'fp32')
    """
    text = name if isinstance(name, str) else str(name) if type(name).__name__ == "dtype" else ""
    ours = {theirs: own for own, theirs in TORCH_NAMES.items()}
    return ours.get(text.removeprefix("torch."), name)
