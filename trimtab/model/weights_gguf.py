"""Reading a GGUF file: every quantization that the `gguf` package can undo, tensor by tensor."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trimtab.facts.errors import ModelError
from trimtab.facts.gguf_header import GGUFHeader, GGUFTensor, read_gguf_header
from trimtab.facts.shapes import ModelShape
from trimtab.model.decoder import Decoder
from trimtab.model.families import family
from trimtab.model.weights import Places, Progress, Provenance, check_dims, check_layers, check_names

_DAMAGED = "the file is damaged or incomplete; download it again"


@dataclass(frozen=True)
class _Survey:
    header: GGUFHeader
    wanted: dict[str, str]
    """The file's names to ours."""
    layouts: dict[str, tuple[Any, int]]
    """The file's names to (gguf's quantization type, bytes stored)."""
    ignored: list[str]


def load_gguf(
    decoder: Decoder, path: Path, progress: Progress | None, places: Places | None = None
) -> Provenance:
    """Fill a decoder from a GGUF file; see `load_weights`."""
    found = survey_gguf(decoder.shape, path)
    header, wanted, layouts = found.header, found.wanted, found.layouts
    maps = family(decoder.shape.family)
    places = places or Places(decoder)
    data = np.memmap(path, dtype=np.uint8, mode="r")
    for done, (stored, name) in enumerate(wanted.items(), 1):
        kind, num_bytes = layouts[stored]
        array = _dequantize(data, header.tensors[stored], kind, num_bytes)
        if maps.gguf_pairs_rotary_rows:
            array = unpair_rotary_rows(array, name, decoder.shape)
        places.put(name, torch.from_numpy(array), str(path))
        if progress is not None:
            progress(done, len(wanted), name)
    return Provenance(
        path=path,
        kind="gguf",
        files={path.name: header.file_size},
        formats=dict(Counter(kind.name for kind, _ in layouts.values())),
        num_tensors=len(wanted),
        ignored=found.ignored,
    )


def survey_gguf(shape: ModelShape, path: Path) -> _Survey:
    """The header's tensors, checked to be the shape's, to lie inside the file and not to share its bytes."""
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
            f"{path} declares tensors of {declared} bytes and has {header.file_size}: some overlap", _DAMAGED
        )
    return _Survey(header, wanted, layouts, ignored)


def _layout(header: GGUFHeader, entry: GGUFTensor) -> tuple[Any, int]:
    """(gguf's quantization type, bytes stored), the bytes checked to lie inside the file."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import _type_traits  # the package's own table of what it can dequantize

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


def _dequantize(data: np.ndarray, entry: GGUFTensor, kind: Any, num_bytes: int) -> np.ndarray:
    """The tensor in fp32, [rows, columns] or [columns]."""
    from gguf.quants import dequantize

    raw = np.asarray(data[entry.offset : entry.offset + num_bytes])
    rows = raw.reshape(*entry.dims[:-1], -1)
    # An alignment smaller than 4 is legal in the format and not in numpy's views.
    aligned = np.require(rows, requirements=["C", "A"]) if entry.offset % 8 == 0 else rows.copy()
    array = np.asarray(dequantize(aligned, kind), dtype=np.float32).reshape(entry.dims)
    # fp32 tensors come back as views of the read-only map, which torch warns about.
    return array if array.flags.writeable else array.copy()


def unpair_rotary_rows(array: np.ndarray, name: str, shape: ModelShape) -> np.ndarray:
    """Rows of q and k back in Hugging Face's order.

    llama.cpp rotates neighbouring numbers (0, 1), (2, 3) … of a head, transformers (0, D/2), (1, D/2 + 1) …;
    its converter therefore interleaves the two halves of each head for architecture "llama".
    """
    attention, module = shape.attention, name.rpartition(".")[0].rpartition(".")[2]
    if module == "qkv_proj":
        rotated = attention.q_size + attention.kv_size
        return np.concatenate([_unpaired(array[:rotated], attention.head_dim), array[rotated:]])
    return _unpaired(array, attention.head_dim) if module in ("q_proj", "k_proj") else array


def _unpaired(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """The interleaved halves of each head one behind the other."""
    paired = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(rows.shape)
