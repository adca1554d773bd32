"""8-bit quantization in Triton: one launch, and one more for the extremes of a whole tensor.

Compiled without fused multiply-add: the reference rounds the product before it adds.
"""

# R rows, C columns, S scales, G values per group

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trimtab.kernels.int8 import spec

SMALLEST_NORMAL = tl.constexpr(spec.SMALLEST_NORMAL)
TILE = 4096
"""Values per program."""


@triton.jit
def round_to_nearest(value):  # type: ignore[no-untyped-def]
    """Rounds to the nearest integer, half to even, for |value| < 2²²: the sum has no mantissa bits for a fraction."""
    return (value + 12582912.0) - 12582912.0


@triton.jit
def _maximum(a, b):  # type: ignore[no-untyped-def]
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _minimum(a, b):  # type: ignore[no-untyped-def]
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def parameters(low, high, AFFINE: tl.constexpr):  # type: ignore[no-untyped-def]
    """See `impl_reference.parameters`."""
    if AFFINE:
        low, high = _minimum(low, low * 0.0), _maximum(high, high * 0.0)
        scale = tl.div_rn(high, tl.zeros_like(high) + 255.0) - tl.div_rn(low, tl.zeros_like(low) + 255.0)
    else:
        scale = tl.div_rn(_maximum(-low, high), tl.zeros_like(high) + 127.0)
    tiny = scale < SMALLEST_NORMAL
    scale = tl.where(tiny, 0.0, scale)
    inverse = tl.where(tiny, 0.0, tl.div_rn(tl.zeros_like(scale) + 1.0, tl.where(tiny, 1.0, scale)))
    zero = round_to_nearest(-low * inverse) - 128.0 if AFFINE else scale * 0.0
    return scale, inverse, zero


@triton.jit
def encode(value, inverse, zero, AFFINE: tl.constexpr):  # type: ignore[no-untyped-def]
    code = round_to_nearest(value * inverse) + zero
    lowest = -128.0 if AFFINE else -127.0
    return tl.minimum(tl.maximum(code, lowest), 127.0).to(tl.int8)


@triton.jit
def _groups_kernel(  # type: ignore[no-untyped-def]
    x_ptr, codes_ptr, scale_ptr, zero_ptr, num_scales, columns, length, groups,
    S: tl.constexpr, G: tl.constexpr, AFFINE: tl.constexpr,
):  # fmt: skip
    """A program quantizes S groups of up to G values, each read once."""
    s = tl.program_id(0).to(tl.int64) * S + tl.arange(0, S)
    inside_S = s < num_scales
    row, group = s // groups, (s % groups).to(tl.int32)
    column = group[:, None] * length + tl.arange(0, G)[None, :]
    inside = inside_S[:, None] & (tl.arange(0, G) < length)[None, :] & (column < columns)
    at = row[:, None] * columns + column
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    low = tl.reduce(tl.where(inside, x, float("inf")), 1, _minimum)
    high = tl.reduce(tl.where(inside, x, float("-inf")), 1, _maximum)
    # groups past the end have no extremes
    low, high = tl.where(inside_S, low, 0.0), tl.where(inside_S, high, 0.0)
    scale, inverse, zero = parameters(low, high, AFFINE)
    tl.store(codes_ptr + at, encode(x, inverse[:, None], zero[:, None], AFFINE), mask=inside)
    tl.store(scale_ptr + s, scale, mask=inside_S)
    if AFFINE:
        tl.store(zero_ptr + s, zero.to(tl.int8), mask=inside_S)


@triton.jit
def _long_kernel(  # type: ignore[no-untyped-def]
    x_ptr, codes_ptr, scale_ptr, zero_ptr, columns, length, groups, TILE: tl.constexpr, AFFINE: tl.constexpr
):  # fmt: skip
    """A program quantizes one group longer than a tile: one pass for the extremes, one more for the codes."""
    s = tl.program_id(0).to(tl.int64)
    first = (s % groups) * length
    count = tl.minimum(length, columns - first)
    start = (s // groups) * columns + first
    lane = tl.arange(0, TILE)
    low = tl.full((TILE,), float("inf"), tl.float32)
    high = tl.full((TILE,), float("-inf"), tl.float32)
    for done in range(0, count, TILE):
        inside = done + lane < count
        x = tl.load(x_ptr + start + done + lane, mask=inside, other=0.0).to(tl.float32)
        low = _minimum(low, tl.where(inside, x, float("inf")))
        high = _maximum(high, tl.where(inside, x, float("-inf")))
    scale, inverse, zero = parameters(
        tl.reduce(low, 0, _minimum) + tl.zeros((1,), tl.float32),
        tl.reduce(high, 0, _maximum) + tl.zeros((1,), tl.float32),
        AFFINE,
    )
    for done in range(0, count, TILE):
        inside = done + lane < count
        x = tl.load(x_ptr + start + done + lane, mask=inside, other=0.0).to(tl.float32)
        tl.store(codes_ptr + start + done + lane, encode(x, inverse, zero, AFFINE), mask=inside)
    one = tl.arange(0, 1)
    tl.store(scale_ptr + s + one, scale)
    if AFFINE:
        tl.store(zero_ptr + s + one, zero.to(tl.int8))


@triton.jit
def _tensor_kernel(  # type: ignore[no-untyped-def]
    x_ptr, low_ptr, high_ptr, codes_ptr, scale_ptr, zero_ptr, count, TILE: tl.constexpr, AFFINE: tl.constexpr
):  # fmt: skip
    """A program quantizes a tile; each computes the scale from the tensor's extremes, the first writes it."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    one = tl.arange(0, 1)
    x = tl.load(x_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    scale, inverse, zero = parameters(
        tl.load(low_ptr + one).to(tl.float32), tl.load(high_ptr + one).to(tl.float32), AFFINE
    )
    tl.store(codes_ptr + at, encode(x, inverse, zero, AFFINE), mask=at < count)
    if tl.program_id(0) == 0:
        tl.store(scale_ptr + one, scale)
        if AFFINE:
            tl.store(zero_ptr + one, zero.to(tl.int8))


@triton.jit
def _dequantize_kernel(  # type: ignore[no-untyped-def]
    codes_ptr, scale_ptr, zero_ptr, out_ptr, count, columns, length, groups,
    TILE: tl.constexpr, AFFINE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * TILE
    lane = tl.arange(0, TILE)
    inside = lane < count - start
    if WHOLE:
        s = lane * 0
    else:
        first_row = start // columns
        place = (start - first_row * columns).to(tl.int32) + lane
        s = (first_row + place // columns) * groups + (place % columns) // length
    value = tl.load(codes_ptr + start + lane, mask=inside, other=0).to(tl.float32)
    if AFFINE:
        value -= tl.load(zero_ptr + s, mask=inside, other=0).to(tl.float32)
    value *= tl.load(scale_ptr + s, mask=inside, other=0.0)
    tl.store(out_ptr + start + lane, value.to(out_ptr.dtype.element_ty), mask=inside)


def quantize(x: torch.Tensor, length: int, affine: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `impl_reference.quantize`."""
    x = x.contiguous()
    count = spec.num_scales(tuple(x.shape), length)
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scale_S = torch.empty(count, dtype=torch.float32, device=x.device)
    zero_S = torch.empty(count * affine, dtype=torch.int8, device=x.device)
    if x.numel() == 0:
        return codes, scale_S.zero_(), zero_S.zero_()
    options = {"AFFINE": affine, "num_warps": 4, "enable_fp_fusion": False}
    if length == 0:
        low, high = torch.aminmax(x)
        grid = (-(-x.numel() // TILE),)
        _tensor_kernel[grid](x, low, high, codes, scale_S, zero_S, x.numel(), TILE=TILE, **options)
        return codes, scale_S, zero_S
    columns = x.shape[-1] if x.ndim else 1
    groups = -(-columns // length)
    width = triton.next_power_of_2(min(length, columns))
    if width > TILE:
        _long_kernel[(count,)](x, codes, scale_S, zero_S, columns, length, groups, TILE=TILE, **options)
    else:
        each = min(TILE // width, 256)  # more of them, with 64-bit offsets, would not fit into registers
        _groups_kernel[(-(-count // each),)](
            x, codes, scale_S, zero_S, count, columns, length, groups, S=each, G=width, **options
        )
    return codes, scale_S, zero_S


def dequantize(
    codes: torch.Tensor,
    scale_S: torch.Tensor,
    zero_S: torch.Tensor,
    length: int,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `impl_reference.dequantize`."""
    codes = codes.contiguous()
    if out is None:
        out = torch.empty(codes.shape, dtype=dtype, device=codes.device)
    count = codes.numel()
    if count:
        columns = codes.shape[-1] if codes.ndim else 1
        _dequantize_kernel[(-(-count // TILE),)](
            codes,
            scale_S,
            zero_S,
            out,
            count,
            columns,
            max(length, 1),
            -(-columns // max(length, 1)),
            TILE=TILE,
            AFFINE=zero_S.numel() > 0,
            WHOLE=length == 0,
            num_warps=4,
        )
    return out
