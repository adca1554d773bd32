"""The log: one entry per operator, launch and stream operation, in call order."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

ALLOCATIONS = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
"""Operators that only allocate."""
DTYPES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int64: "i64",
    torch.int32: "i32",
}


@dataclass(frozen=True)
class Entry:
    """An operator on device tensors, the launch of a Triton kernel, or an operation on a stream.

    Example:
        >>> Entry("aten.neg.default", {"0": "#1 fp32[2](1,)", "->": "#2 fp32[2](1,)"}).is_allocation
        False
    """

    name: str
    arguments: Mapping[str, str] = field(default_factory=dict)
    """By name or position, in order; `->` is what an operator returns."""
    stream: int = 0
    """0 is the default stream."""
    kernel: str | None = None
    """Of a launch: the key of its `Specialization`."""

    @property
    def is_allocation(self) -> bool:
        """Whether the operator only allocates memory."""
        return self.name.startswith("aten.") and self.name.split(".")[1] in ALLOCATIONS


@dataclass(frozen=True)
class Specialization:
    """A Triton kernel with the types of its arguments and its compile-time constants, as specialized for a launch."""

    kernel: str
    """The folder and the function, whichever file of the folder it is in."""
    place: str
    """Module and function."""
    signature: Mapping[str, str]
    """Parameter to type, in order; `constexpr` for those that are compiled in."""
    constants: Mapping[str, str]
    """Values of the `constexpr` parameters."""
    aligned: tuple[str, ...]
    """Pointers and integers that the compiler may assume to be multiples of 16."""
    options: Mapping[str, str]
    """num_warps, num_stages, …"""

    @property
    def key(self) -> str:
        """A key that is equal only for equal specializations."""
        text = json.dumps(asdict(self), sort_keys=True)
        return f"{self.kernel}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


class Log:
    """Entries and specializations of one case.

    Buffers are numbered in the order in which entries use them, so that two runs that do the same have the same text.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.specializations: dict[str, Specialization] = {}
        self.sources: dict[str, tuple[Any, dict[str, Any]]] = {}
        """By key of a specialization: Triton's source and options, from which it is compiled."""
        self.stream = 0
        self._numbers = itertools.count(1)
        self._addresses = itertools.count(1)

    def add(self, name: str, arguments: Mapping[str, Any], kernel: str | None = None) -> None:
        """Appends an entry; tensors among the arguments are written as buffer, dtype, shape and strides."""
        if Entry(name).is_allocation:  # not numbered: numbers must not depend on memory that nothing uses
            texts = {"->": _layout(arguments["->"])}
        else:
            texts = {key: self.text(value) for key, value in arguments.items()}
        self.entries.append(Entry(name, texts, self.stream, kernel))

    def text(self, value: Any) -> str:
        """An argument as text: device tensors by buffer, host tensors by a checksum of their values."""
        if isinstance(value, torch.Tensor):
            return f"{self._buffer(value)} {_layout(value)}"
        if isinstance(value, list | tuple):
            return f"[{', '.join(self.text(one) for one in value)}]"
        return value.hex() if isinstance(value, float) else str(value)

    def pointer(self, tensor: torch.Tensor) -> str:
        """A tensor as passed to a kernel: buffer with size, dtype and offset. The caller records shape and strides."""
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        return f"{self._buffer(tensor)} {_dtype(tensor)} of {size}{_offset(tensor)}"

    def address(self, tensor: torch.Tensor) -> int:
        """A synthetic address, the same in every run. Buffers are far apart and aligned, as on a GPU."""
        number = self._number(tensor, "address", self._addresses)
        return (number << 36) + int(tensor.storage_offset()) * tensor.element_size()

    def _buffer(self, tensor: torch.Tensor) -> str:
        if tensor.is_cuda:
            return f"#{self._number(tensor, 'number', self._numbers)}"
        return f"host {checksum(tensor)}" if tensor.device.type == "cpu" else tensor.device.type

    def _number(self, tensor: torch.Tensor, name: str, numbers: itertools.count[int]) -> int:
        """A number stored on the storage, which torch returns as the same object as long as the memory is in use."""
        kept: dict[tuple[str, int], int] = tensor.untyped_storage().__dict__.setdefault("_sameness", {})
        if (name, id(self)) not in kept:
            kept[name, id(self)] = next(numbers)
        return kept[name, id(self)]


def _layout(tensor: torch.Tensor) -> str:
    return f"{_dtype(tensor)}{list(tensor.shape)}{tuple(tensor.stride())}{_offset(tensor)}"


def _dtype(tensor: torch.Tensor) -> str:
    return DTYPES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))


def _offset(tensor: torch.Tensor) -> str:
    return f"+{tensor.storage_offset()}" if tensor.storage_offset() else ""


def checksum(tensor: torch.Tensor) -> str:
    """Checksum of the values of a host tensor, whatever its strides.

    Example:
        >>> checksum(torch.ones(2, 3).T) == checksum(torch.ones(3, 2))
        True
    """
    values = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()[:12]
