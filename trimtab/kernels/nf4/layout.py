"""bitsandbytes' entries in a state dict, byte for byte.

weight                                  uint8 [⌈N/2⌉, 1]
weight.absmax                           fp32 [K], or uint8 [K] with double quantization
weight.quant_map                        fp32 [16]
weight.nested_absmax                    fp32 [J]      double quantization only
weight.nested_quant_map                 fp32 [256]    double quantization only
weight.quant_state.bitsandbytes__nf4    uint8: JSON text of the metadata
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from trimtab.facts.errors import ModelError
from trimtab.kernels.nf4 import spec
from trimtab.kernels.nf4.weight import NF4Weight

STATE = "quant_state.bitsandbytes__nf4"
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
JSON_LIMIT = 1 << 16  # a real one is about 150 bytes


def write(weight: NF4Weight, name: str) -> dict[str, torch.Tensor]:
    """The entries of parameter `name`, in bitsandbytes' order. Reads the offset, so it synchronizes with the device."""
    facts: dict[str, Any] = {
        "quant_type": "nf4",
        "blocksize": weight.block,
        "dtype": str(weight.dtype).removeprefix("torch."),
        "shape": list(weight.shape),
    }
    entries = {name: weight.codes.unsqueeze(1), f"{name}.absmax": weight.absmax}
    # the tables are shared between weights; safetensors rejects tensors that share memory
    entries[f"{name}.quant_map"] = weight.quant_map.clone()
    if weight.nested_absmax is not None:
        assert weight.nested_quant_map is not None
        assert weight.offset is not None
        facts["nested_blocksize"] = weight.nested_block
        facts["nested_dtype"] = "float32"
        facts["nested_offset"] = weight.offset.item()
        entries[f"{name}.nested_absmax"] = weight.nested_absmax
        entries[f"{name}.nested_quant_map"] = weight.nested_quant_map.clone()
    entries[f"{name}.{STATE}"] = torch.tensor(list(json.dumps(facts).encode()), dtype=torch.uint8)
    return entries


def read(state: Mapping[str, torch.Tensor], name: str) -> NF4Weight:
    """Reads parameter `name`; tensors stay on their device. Raises `ModelError` for a wrong size, type or table."""
    facts = read_metadata(state, name)
    codes = _get_entry(state, name)
    if codes.dtype != torch.uint8:  # quant_storage: the same bytes stored as bf16 or fp32
        codes = codes.contiguous().view(torch.uint8)
    shape, block = facts["shape"], facts["blocksize"]
    count = 1
    for size in shape:
        count *= size
    blocks = spec.num_blocks(count, block)
    codes = _check_tensor(name, codes.reshape(-1), torch.uint8, (count + 1) // 2)
    double = f"{name}.nested_absmax" in state
    kind = torch.uint8 if double else torch.float32
    absmax = _check_tensor(f"{name}.absmax", _get_entry(state, f"{name}.absmax"), kind, blocks)
    quant_map = _check_tensor(f"{name}.quant_map", _get_entry(state, f"{name}.quant_map"), torch.float32, 16)
    if not torch.equal(quant_map.cpu(), torch.tensor(spec.TABLE)):
        raise ModelError(f"{name}.quant_map contains other values than NF4's", "convert it with bitsandbytes")
    dtype = DTYPES[facts["dtype"]]
    if not double:
        return NF4Weight(codes, absmax, quant_map, tuple(shape), dtype, block)
    nested = facts.get("nested_blocksize", spec.NESTED_BLOCK)
    if not isinstance(nested, int) or nested < 2 or nested & (nested - 1):
        raise ModelError(
            f"{name}.{STATE} has a nested_blocksize of {nested!r}, which is not a power of two",
            "convert it again with bitsandbytes",
        )
    offset = facts.get("nested_offset")
    if not isinstance(offset, float | int) or not abs(offset) <= torch.finfo(torch.float32).max:
        raise ModelError(
            f"{name}.{STATE} has no numeric nested_offset", "the file is incomplete: download it again"
        )
    scales = _get_entry(state, f"{name}.nested_absmax")
    table = _get_entry(state, f"{name}.nested_quant_map")
    return NF4Weight(
        codes,
        absmax,
        quant_map,
        tuple(shape),
        dtype,
        block,
        _check_tensor(f"{name}.nested_absmax", scales, torch.float32, spec.num_blocks(blocks, nested)),
        _check_tensor(f"{name}.nested_quant_map", table, torch.float32, 256),
        torch.tensor(float(offset), dtype=torch.float32, device=absmax.device),
        nested,
    )


def _get_entry(state: Mapping[str, torch.Tensor], key: str) -> torch.Tensor:
    if key not in state:
        raise ModelError(f"{key} is missing from the entries of a 4-bit weight", "download the file again")
    return state[key]


def _check_tensor(key: str, tensor: torch.Tensor, dtype: torch.dtype, count: int) -> torch.Tensor:
    if tensor.dtype != dtype or tensor.numel() != count:
        got = f"{tensor.numel()} of {str(tensor.dtype).removeprefix('torch.')}"
        wanted = f"{count} of {str(dtype).removeprefix('torch.')}"
        raise ModelError(f"{key} has {got}, but its shape requires {wanted}", "download the file again")
    return tensor.reshape(-1).contiguous()


def read_metadata(state: Mapping[str, torch.Tensor], name: str) -> dict[str, Any]:
    """The JSON metadata of parameter `name`; validates every field that sizes are computed from."""
    fp4 = f"{name}.quant_state.bitsandbytes__fp4"
    if fp4 in state:
        raise ModelError(f"{name} is in FP4, not NF4", "quantize it again with quant_type nf4")
    packed = _get_entry(state, f"{name}.{STATE}")
    if packed.dtype != torch.uint8 or packed.numel() > JSON_LIMIT:
        raise ModelError(f"{name}.{STATE} is not metadata written by bitsandbytes", "download the file again")
    try:
        facts = json.loads(bytes(packed.reshape(-1).tolist()))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{name}.{STATE} is not valid JSON: {error}", "download the file again") from error
    shape = facts.get("shape") if isinstance(facts, dict) else None
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise ModelError(f"{name}.{STATE} has no shape", "download the file again")
    if facts.get("quant_type") != "nf4":
        raise ModelError(
            f"{name} has quant_type {facts.get('quant_type')!r}, not nf4",
            "quantize it again with quant_type nf4",
        )
    if type(facts.get("blocksize")) is not int or facts["blocksize"] not in spec.BLOCKS:
        raise ModelError(
            f"{name} has blocks of {facts.get('blocksize')!r}",
            f"quantize it again with blocks of {' or '.join(map(str, spec.BLOCKS))}",
        )
    if not isinstance(facts.get("dtype"), str) or facts["dtype"] not in DTYPES:
        raise ModelError(
            f"{name} was quantized from dtype {facts.get('dtype')!r}",
            f"quantize it again from {' or '.join(DTYPES)}",
        )
    return facts
