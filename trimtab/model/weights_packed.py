"""Weights that bitsandbytes quantized before they were saved: several tensors a weight, read as they are.

NF4 has `weight` (packed codes) and `weight.absmax`, `weight.quant_map`, … beside it (`trimtab.kernels.nf4.layout`);
INT8 has `weight` (codes), and beside it `SCB`, the largest magnitude of each row, and `weight_format`.
"""

# N output features, K input features

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from trimtab.facts.errors import ModelError
from trimtab.kernels.int8 import Int8Tensor
from trimtab.kernels.nf4 import NF4Weight, layout

INT8_SCALES = "SCB"
_INT8_FORMAT = "weight_format"
_STATES = tuple(f"quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
_NF4_PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", *_STATES)
TELLING = (INT8_SCALES, *_STATES)
"""The parts that say how a weight is quantized."""

PackedWeight = NF4Weight | Int8Tensor
_DAMAGED = "the weights are damaged; fetch them again"


class StoredPacking(NamedTuple):
    """How weights lie in files: what `adapt.quantize_layout` needs to lay a model out in the same way."""

    kind: str
    """nf4 or int8."""
    block: int
    """NF4: values that share a scale."""
    double: bool
    """NF4: scales in 8 bits."""


def owner_of(key: str) -> tuple[str, str] | None:
    """(the weight's name, which part of it) for a tensor that belongs to a quantized weight; else None.

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
    """A part's name beside a weight that is called "weight"."""
    return part if part in (INT8_SCALES, _INT8_FORMAT) else f"weight.{part}"


def check_facts_size(dims: tuple[int, ...], name: str) -> None:
    """ModelError for a text that is larger than any real one, before it is read."""
    if len(dims) != 1 or dims[0] > layout.JSON_LIMIT:
        raise ModelError(f"{name} is not the text that bitsandbytes writes", "fetch the file again")


def packing_of(state: Mapping[str, torch.Tensor]) -> StoredPacking:
    """What the text beside an NF4 weight says."""
    facts = layout.read_facts(state, "weight")
    return StoredPacking("nf4", facts["blocksize"], "nested_offset" in facts)


def dims_of(state: Mapping[str, torch.Tensor]) -> tuple[int, ...]:
    """The dimensions that the text beside an NF4 weight says."""
    return tuple(layout.read_facts(state, "weight")["shape"])


def read(state: Mapping[str, torch.Tensor], where: str) -> PackedWeight:
    """A quantized weight from its tensors, every size checked, and the numbers that scale it."""
    if INT8_SCALES not in state:
        try:
            weight = NF4Weight.from_bitsandbytes(state)
        except ModelError as error:
            raise ModelError(f"{where}: {error.cause}", error.remedy or _DAMAGED) from error
        _check_scales(weight.absmax if weight.nested_absmax is None else weight.nested_absmax, where)
        for tensor in (weight.nested_quant_map, weight.offset):
            if tensor is not None:
                _check_finite(tensor, where)
        return weight
    codes_NK, largest_N = state["weight"], state[INT8_SCALES]
    if codes_NK.dtype != torch.int8 or codes_NK.ndim != 2:
        raise ModelError(
            f"{where}: a weight with SCB beside it is {codes_NK.dtype}, not int8", "fetch it again"
        )
    if largest_N.dtype != torch.float32 or largest_N.shape != codes_NK.shape[:1]:
        raise ModelError(
            f"{where}: SCB is not one fp32 number for each of {codes_NK.shape[0]} rows", "fetch it again"
        )
    _check_scales(largest_N, where)
    order = state.get(_INT8_FORMAT, torch.tensor(0))
    if order.numel() != 1 or int(order) != 0:
        raise ModelError(
            f"{where}: an INT8 weight in another order than row by row",
            "save it again with a newer bitsandbytes",
        )
    none = codes_NK.new_empty(0)
    # theirs is w ≈ code · SCB / 127, ours code · scale
    return Int8Tensor(codes_NK, largest_N / 127.0, none, codes_NK.shape[1], torch.float16)


def _check_scales(scales: torch.Tensor, where: str) -> None:
    _check_finite(scales, where)
    if bool((scales < 0).any()):
        raise ModelError(f"{where}: a quantized weight has negative scales", _DAMAGED)


def _check_finite(tensor: torch.Tensor, where: str) -> None:
    if not bool(torch.isfinite(tensor).all()):
        raise ModelError(f"{where}: what scales a quantized weight holds NaN or infinity", _DAMAGED)
