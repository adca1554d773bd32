"""NF4 in torch: the kernels must be bitwise identical to it.

There is one exception on a GPU: bitsandbytes (and so the Triton version) uses the hardware's approximate reciprocal of
a block's scale, which may be an ulp off. Scaled values that then cross a threshold get the neighbouring code: never for
bf16 (no quotient of two bf16 numbers is within 9 ulp of a threshold), about one in 10⁷ for fp32.
"""

# N values, B values per block, K blocks, J blocks of scales

from __future__ import annotations

import torch

from trimtab.kernels.nf4 import spec

CHUNK = 1 << 22  # values per chunk: 50 MB of fp32 copies and indices
CACHED = 1 << 18  # the same for cheap loops, where a CPU's cache size matters


def flush_subnormals(value: torch.Tensor) -> torch.Tensor:
    """Flushes subnormal fp32 values to zeros of their sign, as in code compiled with fast math."""
    return torch.where(value.abs() < spec.SMALLEST_NORMAL, value * 0.0, value)


def reciprocal(absmax_K: torch.Tensor) -> torch.Tensor:
    """1 / absmax [K], with subnormals flushed to zero."""
    return flush_subnormals(absmax_K.reciprocal())


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a · b with subnormal factors and results flushed to zero."""
    return flush_subnormals(flush_subnormals(a) * flush_subnormals(b))


def quantize_blocks(
    weight: torch.Tensor, block: int, zero_code: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes any shape to codes uint8 [⌈N/2⌉], absmax fp32 [K]."""
    flat_N = weight.reshape(-1)
    count = flat_N.numel()
    blocks = spec.num_blocks(count, block)
    thresholds = torch.tensor(spec.THRESHOLDS, dtype=torch.float32, device=flat_N.device)
    absmax_K = torch.empty(blocks, dtype=torch.float32, device=flat_N.device)
    codes = torch.empty((count + 1) // 2, dtype=torch.uint8, device=flat_N.device)
    step = max(1, CHUNK // block)
    for first in range(0, blocks, step):
        values = flat_N[first * block : (first + step) * block].float()
        size = values.numel()
        values_KB = torch.nn.functional.pad(values, (0, -size % block)).view(-1, block)
        largest_K = flush_subnormals(values_KB.abs().amax(1))
        # a subnormal product needs no flushing: it is between the same thresholds as 0
        scaled_KB = flush_subnormals(values_KB) * reciprocal(largest_K).unsqueeze(1)
        codes_KB = torch.bucketize(scaled_KB, thresholds, out_int32=True).to(torch.uint8)
        codes_KB[largest_K == 0] = zero_code
        pairs = codes_KB.view(-1, 2)
        packed = (pairs[:, 0] << 4 | pairs[:, 1])[: (size + 1) // 2]
        start = first * block // 2
        codes[start : start + packed.numel()] = packed
        absmax_K[first : first + step] = largest_K
    return codes, absmax_K


def quantize_scales(
    absmax_K: torch.Tensor, offset: torch.Tensor, nested_quant_map: torch.Tensor, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes scales fp32 [K] minus their mean to uint8 [K] codes of the 8-bit map, with scales fp32 [J].

    The nearest value, found as bitsandbytes finds it: e is the even index whose odd neighbours enclose x, then
    e − 1, e or e + 1. So a tie stays at e. NaN (a mean that overflowed) is above nothing: code 0.
    """
    shifted_K = absmax_K - offset
    count = shifted_K.numel()
    blocks_JB = torch.nn.functional.pad(shifted_K, (0, -count % block)).view(-1, block)
    largest_J = flush_subnormals(blocks_JB.abs().amax(1))
    x_JB = product(blocks_JB, reciprocal(largest_J).unsqueeze(1))
    even_JB = 2 * torch.bucketize(x_JB, nested_quant_map[1:254:2].contiguous())
    value_JB = nested_quant_map[even_JB]
    above_JB = (value_JB + nested_quant_map[even_JB + 1]) * 0.5
    below_JB = (value_JB + nested_quant_map[(even_JB - 1).clamp(min=0)]) * 0.5
    up_JB = (x_JB > value_JB) & (x_JB > above_JB)
    down_JB = (x_JB <= value_JB) & (x_JB < below_JB)
    code_JB = even_JB + up_JB.long() - (down_JB & (even_JB > 0)).long()
    code_JB = torch.where(x_JB.isnan(), 0, code_JB)
    code_JB[largest_J == 0] = 0
    return code_JB.to(torch.uint8).view(-1)[:count].clone(), largest_J


def scales(
    absmax_K: torch.Tensor,
    nested_absmax_J: torch.Tensor | None,
    nested_quant_map: torch.Tensor | None,
    offset: torch.Tensor | None,
    nested_block: int,
    first_block: int = 0,
) -> torch.Tensor:
    """The fp32 scale of every block. With `first_block`, `absmax_K` starts at that block, and the nested scales
    are those of the whole tensor."""
    if nested_absmax_J is None:
        return absmax_K
    assert nested_quant_map is not None
    assert offset is not None
    first, start = divmod(first_block, nested_block)
    stop = start + absmax_K.numel()
    nested_J = nested_absmax_J[first : first + spec.num_blocks(stop, nested_block)]
    scale_K = nested_J.repeat_interleave(nested_block)[start:stop]
    return product(nested_quant_map[absmax_K.int()], scale_K) + offset


def dequantize(
    codes: torch.Tensor,
    absmax_K: torch.Tensor,
    quant_map: torch.Tensor,
    nested_absmax_J: torch.Tensor | None,
    nested_quant_map: torch.Tensor | None,
    offset: torch.Tensor | None,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    block: int,
    nested_block: int,
    transposed: bool = False,
    out: torch.Tensor | None = None,
    first_block: int = 0,
) -> torch.Tensor:
    """Dequantizes to `shape` in `dtype`; with `transposed` the last two dimensions swapped. Rounded once, from fp32.

    With `out` the values are written there, and it is returned. Codes and scales may have any contiguous shape. A
    slice's begin with block `first_block` of the whole tensor, whose nested scales are passed in full.
    """
    codes, absmax_K = codes.view(-1), absmax_K.view(-1)
    scale_K = scales(absmax_K, nested_absmax_J, nested_quant_map, offset, nested_block, first_block)
    count = 1
    for size in shape:
        count *= size
    direct = out is not None and not transposed
    out_N = out.view(-1) if out is not None and direct else codes.new_empty(count, dtype=dtype)
    # Looks up a byte's two values at once: a third of the time of shifting and masking on a CPU.
    pair_256_2 = torch.stack((quant_map.repeat_interleave(16), quant_map.repeat(16)), 1)
    for start in range(0, count, CACHED):
        stop = min(start + CACHED, count)
        packed = codes[start // 2 : (stop + 1) // 2]
        values_N = pair_256_2.index_select(0, packed.int()).view(-1)
        if values_N.numel() % block:
            values_N = torch.nn.functional.pad(values_N, (0, -values_N.numel() % block))
        values_N.view(-1, block).mul_(scale_K[start // block : spec.num_blocks(stop, block)].unsqueeze(1))
        out_N[start:stop] = flush_subnormals(values_N)[: stop - start]
    if not transposed:
        return out_N.view(shape) if out is None else out
    transposed_weight = out_N.view(shape).transpose(-1, -2)
    return transposed_weight.contiguous() if out is None else out.copy_(transposed_weight)
