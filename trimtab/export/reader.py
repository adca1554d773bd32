"""A safetensors reader that is independent of the safetensors library: struct, JSON and numpy.

Format: header length (8 bytes), JSON header, tensor data; offsets are relative to the data.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.facts.errors import ModelError
from trimtab.facts.files import read_json_object

SAFETENSORS_DTYPES = {"fp32": "F32", "bf16": "BF16", "fp16": "F16", "fp64": "F64"}
_REMEDY = "check the disk and try again"


@dataclass(frozen=True)
class StoredTensor:
    """Location of one tensor in a file."""

    path: Path
    shape: tuple[int, ...]
    dtype: str
    begin: int
    end: int

    def raw(self) -> np.ndarray:
        """The tensor's bytes as uint8, memory-mapped from the file."""
        if self.begin == self.end:
            return np.empty(0, dtype=np.uint8)
        return np.memmap(
            self.path, dtype=np.uint8, mode="r", offset=self.begin, shape=(self.end - self.begin,)
        )


def read_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors in a folder's safetensors files; the index file, if any, is validated against them."""
    tensors: dict[str, StoredTensor] = {}
    weight_map: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, tensor in _read_header(path).items():
            if name in tensors:
                raise ModelError(f"{name} is stored twice in {folder}", _REMEDY)
            tensors[name] = tensor
            weight_map[name] = path.name
    index = folder / "model.safetensors.index.json"
    if index.is_file() and read_json_object(index)["weight_map"] != weight_map:
        raise ModelError(f"{index} does not match the files next to it", _REMEDY)
    return tensors


def _read_header(path: Path) -> dict[str, StoredTensor]:
    size = path.stat().st_size
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > size - 8:
            raise ModelError(f"the header of {path} is longer than the file", _REMEDY)
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    start, at = 8 + length, 0
    tensors: dict[str, StoredTensor] = {}
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        if begin != at or start + end > size:
            raise ModelError(f"{path}: {name} does not follow the tensor before it", _REMEDY)
        at = end
        tensors[name] = StoredTensor(path, tuple(entry["shape"]), entry["dtype"], start + begin, start + end)
    if start + at != size:
        raise ModelError(f"{path} has {size - start - at} bytes that belong to no tensor", _REMEDY)
    return tensors
