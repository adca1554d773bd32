"""Reads GGUF files by slices of tensors, with every quantization that the `gguf` package can dequantize.

Quantization blocks do not span rows, so that rows and ranges of blocks are dequantized independently.
"""

# R rows, C columns, B blocks per row

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from trimtab.facts.errors import ModelError
from trimtab.facts.gguf_header import GGUFHeader, GGUFTensor, read_gguf_header
from trimtab.facts.shapes import ModelShape
from trimtab.facts.slices import Slice
from trimtab.model.families import family
from trimtab.model.weights_checks import check_dims, check_layers, check_names
from trimtab.model.weights_reader import Provenance, WeightReader

_DAMAGED = "the file is damaged or incomplete; download it again"
_CHUNK = 2**22
"""Elements per dequantization: the package allocates two to six copies of them."""


@dataclass(frozen=True)
class _Survey:
    """The tensors of a file, validated against a model."""

    header: GGUFHeader
    wanted: dict[str, str]
    """Maps the file's tensor names to trimtab's."""
    layouts: dict[str, tuple[Any, int]]
    """Maps the file's tensor names to (gguf's quantization type, stored bytes)."""
    ignored: list[str]


class GGUFReader(WeightReader):
    """Reads the tensors of a GGUF file in fp32, rows of q and k in Hugging Face's order; see `open_weights`."""

    def __init__(self, shape: ModelShape, path: Path) -> None:
        found = survey_gguf(shape, path)
        self._path, self._layouts = path, found.layouts
        self._tensors = {name: found.header.tensors[stored] for stored, name in found.wanted.items()}
        self._shape, self._is_paired = shape, family(shape.family).gguf_pairs_rotary_rows
        self._data: np.ndarray | None = None
        self.dims = {name: entry.dims for name, entry in self._tensors.items()}
        self.provenance = Provenance(
            path=path,
            kind="gguf",
            files={path.name: found.header.file_size},
            formats=dict(Counter(kind.name for kind, _ in found.layouts.values())),
            num_tensors=len(found.wanted),
            ignored=found.ignored,
        )

    def __enter__(self) -> Self:
        self._data = np.asarray(np.memmap(self._path, dtype=np.uint8, mode="r"))
        return self

    def __exit__(self, *exception: Any) -> None:
        self._data = None

    def file_of(self, name: str) -> str:
        return str(self._path)

    def read(self, name: str, part: Slice) -> torch.Tensor:
        """See `WeightReader.read`. Dequantizes all of a vector, and the blocks of a matrix that overlap the slice."""
        from gguf.constants import GGML_QUANT_SIZES

        assert self._data is not None, "enter the reader first"
        entry = self._tensors[name]
        kind, num_bytes = self._layouts[entry.name]
        block, block_bytes = GGML_QUANT_SIZES[kind]
        raw = self._data[entry.offset : entry.offset + num_bytes]
        if len(entry.dims) == 1:
            values = _dequantize(raw.reshape(1, -1, block_bytes), kind).reshape(-1)
            return torch.from_numpy(values[self._rows(name, part.start, part.stop)])
        blocks_RB = raw.reshape(entry.dims[0], entry.dims[1] // block, block_bytes)
        first, last = part.along(0, entry.dims)
        left, right = part.along(1, entry.dims)
        block_left, block_right = left // block, -(-right // block)
        out_RC = np.empty((last - first, right - left), dtype=np.float32)
        step = max(1, _CHUNK // max(1, (block_right - block_left) * block))
        for start in range(first, last if left < right else first, step):
            stop = min(start + step, last)
            values_RC = _dequantize(blocks_RB[self._rows(name, start, stop), block_left:block_right], kind)
            within = slice(left - block_left * block, right - block_left * block)
            out_RC[start - first : stop - first] = values_RC[:, within]
        return torch.from_numpy(out_RC)

    def _rows(self, name: str, start: int, stop: int) -> slice | np.ndarray:
        """The indices in the file of rows `start` to `stop` of a parameter."""
        return stored_rows(name, self._shape, start, stop) if self._is_paired else slice(start, stop)


def stored_rows(name: str, shape: ModelShape, start: int, stop: int) -> slice | np.ndarray:
    """The indices of rows `start` to `stop` of a parameter in a GGUF file of architecture "llama".

    Rows of q and k are interleaved, those of v are not, separate or in one fused matrix.
    """
    module = name.rpartition(".")[0].rpartition(".")[2]
    if module not in ("q_proj", "k_proj", "qkv_proj"):
        return slice(start, stop)
    attention, rows = shape.block_of(name).attention, np.arange(start, stop)
    rotated = attention.q_size + attention.kv_size  # a fused matrix has the rows of v after them
    return np.where(rows < rotated, paired_rows(rows, attention.head_dim), rows)


def paired_rows(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """The indices of q's or k's rows, in Hugging Face's order, in a GGUF file of architecture "llama".

    llama.cpp rotates neighbouring elements (0, 1), (2, 3) … of a head, transformers (0, D/2), (1, D/2 + 1) …;
    its converter therefore interleaves the two halves of each head.

    Example:
        >>> paired_rows(np.arange(8), head_dim=4).tolist()
        [0, 2, 1, 3, 4, 6, 5, 7]
    """
    head, row = np.divmod(rows, head_dim)
    half, pair = np.divmod(row, head_dim // 2)
    return head * head_dim + 2 * pair + half


def _dequantize(blocks_RB: np.ndarray, kind: Any) -> np.ndarray:
    """Dequantizes blocks uint8 [R, B, bytes per block] to a new fp32 tensor [R, columns]."""
    from gguf.quants import dequantize

    # A copy, because the file's pages are read-only and its tensors may be unaligned.
    rows = np.array(blocks_RB, order="C").reshape(blocks_RB.shape[0], -1)
    return np.asarray(dequantize(rows, kind), dtype=np.float32)


def survey_gguf(shape: ModelShape, path: Path) -> _Survey:
    """Reads the header's tensors; validates that they match the shape, are within the file and do not overlap."""
    header = read_gguf_header(path)
    maps = family(shape.family)
    check_layers(shape, len(header.tensors), "block_count", str(path))
    dims = dict(shape.parameters())
    wanted = {maps.gguf_name(name): name for name in dims}
    ignored = [
        name
        for name in header.tensors
        if maps.ignores_gguf(name) or (shape.tie_embeddings and name == "output.weight")
    ]
    check_names(wanted, {name: name for name in header.tensors if name not in ignored}, str(path))
    layouts = {}
    for stored, name in wanted.items():
        entry = header.tensors[stored]
        check_dims(name, entry.dims, dims[name], str(path), shape)
        layouts[stored] = _layout(header, entry)
    declared = sum(num_bytes for _, num_bytes in layouts.values())
    if declared > header.file_size:
        raise ModelError(
            f"{path} declares tensors of {declared} bytes but has {header.file_size}: some overlap", _DAMAGED
        )
    return _Survey(header, wanted, layouts, ignored)


def _layout(header: GGUFHeader, entry: GGUFTensor) -> tuple[Any, int]:
    """Returns (gguf's quantization type, bytes stored); validates that the bytes are within the file."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import _type_traits  # the package's own table of supported quantizations

    where = f"{header.path}: tensor {entry.name!r}"
    types = GGMLQuantizationType
    known = {types.F32, types.F16, *_type_traits}
    if entry.type_id not in set(types) or types(entry.type_id) not in known:
        label = types(entry.type_id).name if entry.type_id in set(types) else f"type {entry.type_id}"
        raise ModelError(
            f"{where} is stored as {label}", f"supported are {', '.join(sorted(t.name for t in known))}"
        )
    kind = types(entry.type_id)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    if entry.dims[-1] % block:
        raise ModelError(f"{where}: rows of {entry.dims[-1]} do not divide into blocks of {block}", _DAMAGED)
    num_bytes = int(np.prod([int(dim) for dim in entry.dims], dtype=object)) // block * block_bytes
    if entry.offset + num_bytes > header.file_size:
        raise ModelError(f"{where} ends beyond the file's {header.file_size} bytes", _DAMAGED)
    return kind, num_bytes
