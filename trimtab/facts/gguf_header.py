"""Reads the header of a GGUF file: metadata and the list of tensors, with every count checked against the file's size.

The reader of the `gguf` package loops over counts that the file claims (an array "of 2⁶⁰ bytes" hangs it) and takes
2.5 s for SmolLM2's header; this one takes 0.1 s. The package is used for dequantization. Format: versions 2 and 3 of
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.facts.errors import ModelError

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
_MAX_NESTING = 4
_REMEDY = "the file is damaged or not GGUF; download it again"


@dataclass(frozen=True)
class GGUFTensor:
    """Metadata of one tensor: `dims` in numpy's order (rows first), `offset` from the start of the file."""

    name: str
    dims: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True)
class GGUFHeader:
    """The part of a GGUF file before the tensor data.

    Example:
        >>> header = read_gguf_header("model.gguf")            # doctest: +SKIP
        >>> header.tensors["token_embd.weight"].dims           # doctest: +SKIP
        (49152, 576)
    """

    path: Path
    file_size: int
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


def is_gguf(path: str | Path) -> bool:
    """Whether a path is a GGUF file, by its suffix or its first four bytes."""
    path = Path(path)
    if not path.is_file():
        return False
    if path.suffix.lower() == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(4) == _MAGIC


def read_gguf_header(path: str | Path) -> GGUFHeader:
    """Reads metadata and tensor entries of a GGUF file; ModelError for a truncated or malformed file."""
    path = Path(path)
    if not path.is_file():
        raise ModelError(f"{path} does not exist", "check the path")
    size = path.stat().st_size
    if size < 24:
        raise ModelError(f"{path} is too short for a GGUF file ({size} bytes)", _REMEDY)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _Reader(data, path, size).header()


class _Reader:
    """Parses the header; `take` never advances past the end, so no count can make it allocate or loop."""

    def __init__(self, data: mmap.mmap, path: Path, size: int) -> None:
        self.data, self.path, self.size, self.at = data, path, size, 0

    def fail(self, cause: str) -> ModelError:
        return ModelError(f"{self.path}: {cause}", _REMEDY)

    def take(self, count: int) -> int:
        start = self.at
        if count > self.size - start:
            raise self.fail(f"{count} bytes at offset {start} extend beyond the file's {self.size}")
        self.at += count
        return start

    def number(self, code: str) -> Any:
        return struct.unpack_from("<" + code, self.data, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        length = self.number("Q")
        start = self.take(length)
        # Token strings of some files are not UTF-8; undecodable bytes become surrogate escapes.
        return self.data[start : start + length].decode("utf-8", errors="surrogateescape")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY or depth >= _MAX_NESTING:
            raise self.fail(f"unknown metadata type {kind} at offset {self.at}")
        inner, count = self.number("I"), self.number("Q")
        if inner in _SCALARS:
            code = f"<{count}{_SCALARS[inner]}"
            width = struct.calcsize("<" + _SCALARS[inner])
            return list(struct.unpack_from(code, self.data, self.take(count * width)))
        least = 8 if inner == _STRING else 12
        if count * least > self.size - self.at:
            raise self.fail(f"an array of {count} items at offset {self.at} extends beyond the file's end")
        return [self.value(inner, depth + 1) for _ in range(count)]

    def header(self) -> GGUFHeader:
        if self.data[:4] != _MAGIC:
            raise self.fail("it does not begin with GGUF")
        self.take(4)
        version = self.number("I")
        if version not in (2, 3):
            cause = "it is big-endian" if version & 0xFFFF == 0 else f"GGUF version {version}"
            raise ModelError(f"{self.path}: {cause}", "supported are little-endian files of version 2 and 3")
        num_tensors, num_keys = self.number("Q"), self.number("Q")
        # The minimum size of an entry: a key's length, type and value; a tensor's name, dims, type and offset.
        if num_keys * 13 + num_tensors * 24 > self.size:
            raise self.fail(f"it claims {num_keys} keys and {num_tensors} tensors in {self.size} bytes")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self.string()
            if key in metadata:
                raise self.fail(f"key {key!r} appears twice")
            metadata[key] = self.value(self.number("I"))
        entries = [self.entry() for _ in range(num_tensors)]
        return GGUFHeader(self.path, self.size, metadata, self.with_file_offsets(entries, metadata))

    def entry(self) -> GGUFTensor:
        name = self.string()
        num_dims = self.number("I")
        if num_dims > _MAX_DIMS:
            raise self.fail(f"tensor {name!r} has {num_dims} dimensions")
        dims = tuple(self.number("Q") for _ in range(num_dims))
        if any(not 0 < dim < 2**40 for dim in dims):
            raise self.fail(f"tensor {name!r} has dimensions {dims}")
        return GGUFTensor(name, dims[::-1], self.number("I"), self.number("Q"))

    def with_file_offsets(self, entries: list[GGUFTensor], metadata: dict[str, Any]) -> dict[str, GGUFTensor]:
        """Returns the entries by name, with offsets from the file's start; the data begin at the next aligned byte."""
        align = metadata.get("general.alignment", 32)
        if not isinstance(align, int) or align < 1 or align & (align - 1):
            raise self.fail(f"general.alignment is {align!r}")
        start = -(-self.at // align) * align
        tensors: dict[str, GGUFTensor] = {}
        for entry in entries:
            if entry.name in tensors:
                raise self.fail(f"tensor {entry.name!r} appears twice")
            if start + entry.offset > self.size:
                raise self.fail(f"tensor {entry.name!r} begins beyond the file's end")
            tensors[entry.name] = GGUFTensor(entry.name, entry.dims, entry.type_id, start + entry.offset)
        return tensors
