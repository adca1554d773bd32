"""Reads slices of weights that bitsandbytes quantized, packed or dequantized; a weight consists of several tensors.

NF4 has `weight` (packed codes) plus `weight.absmax`, `weight.quant_map`, … (`trimtab.kernels.nf4.layout`);
INT8 has `weight` (codes) plus `SCB`, the largest magnitude of each row, and `weight_format`.
"""

# N output features, K input features

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch

from trimtab.facts.errors import ModelError
from trimtab.facts.slices import Slice, row_chunks
from trimtab.kernels import int8, nf4
from trimtab.kernels.int8 import Int8Tensor
from trimtab.kernels.nf4 import NF4Weight, layout

INT8_SCALES = "SCB"
_INT8_FORMAT = "weight_format"
_STATES = tuple(f"quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
_NF4_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", *_STATES)
METADATA_PARTS = (INT8_SCALES, *_STATES)
"""The tensors that describe how a weight is quantized."""

PackedWeight = NF4Weight | Int8Tensor
_DAMAGED = "the weights are damaged; download them again"
_CHUNK = 2**22
"""Elements per dequantization when slicing columns."""


class StoredQuantization(NamedTuple):
    """The quantization of stored weights, as `adapt.quantize_layout` needs it."""

    kind: str
    """nf4 or int8."""
    block: int
    """NF4: number of elements that share a scale."""
    double: bool
    """NF4: double quantization."""


def owner_of(key: str) -> tuple[str, str] | None:
    """Returns (weight's name, part) for a tensor that belongs to a quantized weight; else None.

    Example:
        >>> owner_of("mlp.up_proj.weight.absmax"), owner_of("mlp.up_proj.SCB"), owner_of("mlp.up_proj.weight")
        (('mlp.up_proj.weight', 'absmax'), ('mlp.up_proj.weight', 'SCB'), None)
    """
    for part in _NF4_PARTS:
        if key.endswith(f".weight.{part}"):
            return key.removesuffix(f".{part}"), part
    for part in (INT8_SCALES, _INT8_FORMAT):
        if key.endswith(f".{part}"):
            return key.removesuffix(part) + "weight", part
    return None


def part_name(part: str) -> str:
    """The name of a part for a weight called "weight"."""
    return part if part in (INT8_SCALES, _INT8_FORMAT) else f"weight.{part}"


def check_metadata_size(dims: tuple[int, ...], name: str) -> None:
    """Raises ModelError for implausibly large metadata, before it is read."""
    if len(dims) != 1 or dims[0] > layout.JSON_LIMIT:
        raise ModelError(f"{name} is not metadata written by bitsandbytes", "download the file again")


def quantization_of(state: Mapping[str, torch.Tensor]) -> StoredQuantization:
    """The quantization from an NF4 weight's metadata."""
    facts = layout.read_metadata(state, "weight")
    return StoredQuantization("nf4", facts["blocksize"], "nested_offset" in facts)


def dims_of(state: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
    """The dimensions from an NF4 weight's metadata."""
    return tuple(layout.read_metadata(state, "weight")["shape"])


def read(state: Mapping[str, torch.Tensor], part: Slice, where: str) -> PackedWeight:
    """Reads a slice of a quantized weight, still packed. Validates every size, and the slice's scales.

    NF4 can be sliced by rows at block boundaries, with double quantization at boundaries of nested blocks. INT8 has one
    scale per row and can be sliced anywhere.

    Args:
        state: the weight's tensors, named as if it were called "weight"; only the slice's bytes are read.
        part: rows or columns.
        where: the file and the weight, for messages.
    """
    weight = _read_stored(state, where)
    cut = _cut_rows(weight, part, where) if isinstance(weight, NF4Weight) else _cut_int8(weight, part)
    _check_all_scales(cut, where)
    return cut


def read_dequantized(state: Mapping[str, torch.Tensor], part: Slice, where: str) -> torch.Tensor:
    """Reads a slice of a quantized weight, dequantized to fp32 [rows, columns]; any slice, bitwise identical to
    dequantizing the full weight. Columns of NF4 are cut from dequantized rows, some rows at a time."""
    weight = _read_stored(state, where)
    if isinstance(weight, Int8Tensor):
        cut = _cut_int8(weight, part)
        _check_all_scales(cut, where)
        return int8.dequantize(cut, dtype=torch.float32)
    if part.dim == 0:
        return _dequantized_rows(weight, part, where)
    out_NK = torch.empty(part.dims_of(weight.shape))
    for rows in row_chunks(weight.shape, _CHUNK):
        values_NK = _dequantized_rows(weight, rows, where)
        out_NK[rows.start : rows.stop] = values_NK[:, part.start : part.stop]
    return out_NK


def _dequantized_rows(weight: NF4Weight, rows: Slice, where: str) -> torch.Tensor:
    """Dequantizes rows of an NF4 weight to fp32; internally it starts at the first nested block that they overlap."""
    columns = weight.shape[1]
    first, stop = rows.start * columns, rows.stop * columns
    grid = _slice_step(weight)
    cut = _values(weight, first // grid * grid, stop)
    _check_all_scales(cut, where)
    values = nf4.dequantize(cut, dtype=torch.float32)
    return values[first - first // grid * grid :].view(rows.stop - rows.start, columns)


def _cut_rows(weight: NF4Weight, part: Slice, where: str) -> NF4Weight:
    """Returns a slice of an NF4 weight, with its stored codes and scales."""
    if part.dim == 1:
        raise ModelError(
            f"{where}: an NF4 weight is packed row by row and cannot be sliced by columns {part.start}:{part.stop}",
            "slice dimension 0, or read the dequantized weight (keep_packed=False)",
        )
    rows, columns = weight.shape
    if part.start == part.stop:
        return replace(_values(weight, 0, 0), shape=(0, columns))
    first, stop, grid = part.start * columns, part.stop * columns, _slice_step(weight)
    if first % grid or (part.stop < rows and stop % weight.block):
        scales = f" whose scales are quantized in blocks of {weight.nested_block}" if weight.double else ""
        step = grid // math.gcd(grid, columns)
        raise ModelError(
            f"{where}: rows {part.start}:{part.stop} of {columns} elements split NF4 blocks of {weight.block}{scales}",
            f"slice at multiples of {step} rows, or read the dequantized weight (keep_packed=False)"
            if step < rows
            else "read all rows, or the dequantized weight (keep_packed=False)",
        )
    return replace(_values(weight, first, stop), shape=part.dims_of(weight.shape))


def _slice_step(weight: NF4Weight) -> int:
    """Elements per nested block, or per block without double quantization."""
    return weight.block * (weight.nested_block if weight.double else 1)


def _values(weight: NF4Weight, first: int, stop: int) -> NF4Weight:
    """Returns elements `first` (a multiple of `_slice_step`) to `stop` of a flattened weight."""
    block, nested = weight.block, weight.nested_absmax
    first_scale, stop_scale = first // block, -(-stop // block)
    if nested is not None:
        size = weight.nested_block
        nested = nested[first_scale // size : -(-stop_scale // size)]
    return replace(
        weight,
        shape=(stop - first,),
        codes=weight.codes[first // 2 : (stop + 1) // 2],
        absmax=weight.absmax[first_scale:stop_scale],
        nested_absmax=nested,
    )


def _cut_int8(weight: Int8Tensor, part: Slice) -> Int8Tensor:
    """Returns a slice of an INT8 weight."""
    (first, last), (left, right) = (part.along(dim, tuple(weight.codes.shape)) for dim in (0, 1))
    codes_NK = weight.codes[first:last, left:right].contiguous()
    return replace(weight, codes=codes_NK, scale=weight.scale[first:last], length=right - left)


def _read_stored(state: Mapping[str, torch.Tensor], where: str) -> PackedWeight:
    """Opens the stored weight and validates every size. Reads no codes or scales yet, except INT8's scales."""
    if INT8_SCALES not in state:
        try:
            return NF4Weight.from_bitsandbytes(state)
        except ModelError as error:
            raise ModelError(f"{where}: {error.cause}", error.remedy or _DAMAGED) from error
    codes_NK, largest_N = state["weight"], state[INT8_SCALES]
    if codes_NK.dtype != torch.int8 or codes_NK.ndim != 2:
        raise ModelError(f"{where}: a weight with SCB is {codes_NK.dtype}, not int8", "download it again")
    if largest_N.dtype != torch.float32 or largest_N.shape != codes_NK.shape[:1]:
        raise ModelError(
            f"{where}: SCB is not one fp32 value for each of {codes_NK.shape[0]} rows", "download it again"
        )
    order = state.get(_INT8_FORMAT, torch.tensor(0))
    if order.numel() != 1 or int(order) != 0:
        raise ModelError(
            f"{where}: the INT8 weight is not row-major",
            "save it again with a newer bitsandbytes",
        )
    none = codes_NK.new_empty(0)
    # bitsandbytes: w ≈ code · SCB / 127; trimtab: w ≈ code · scale
    return Int8Tensor(codes_NK, largest_N / 127.0, none, codes_NK.shape[1], torch.float16)


def _check_all_scales(weight: PackedWeight, where: str) -> None:
    """Raises ModelError if a weight's scales are invalid."""
    if isinstance(weight, Int8Tensor):
        _check_scales(weight.scale, where)
        return
    _check_scales(weight.absmax if weight.nested_absmax is None else weight.nested_absmax, where)
    for tensor in (weight.nested_quant_map, weight.offset):
        if tensor is not None:
            _check_finite(tensor, where)


def _check_scales(scales: torch.Tensor, where: str) -> None:
    _check_finite(scales, where)
    if bool((scales < 0).any()):
        raise ModelError(f"{where}: a quantized weight has negative scales", _DAMAGED)


def _check_finite(tensor: torch.Tensor, where: str) -> None:
    if not bool(torch.isfinite(tensor).all()):
        raise ModelError(f"{where}: the scales of a quantized weight contain NaN or infinity", _DAMAGED)
