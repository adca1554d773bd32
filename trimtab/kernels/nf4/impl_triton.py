"""NF4 in Triton: one launch to quantize, one to dequantize (nested scales are decoded in the same kernel).

Bitwise identical to bitsandbytes' CUDA library, so its arithmetic is reproduced: a reciprocal from the hardware's
approximation, products that flush subnormals, and no fusion of the scale's product with the offset's sum.
`ON_GPU` is False in Triton's interpreter, which has no PTX: there plain operations compute the same.
"""

# N values, W 32-bit words of eight codes, K blocks

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from trimtab.kernels.nf4 import spec

SMALLEST_NORMAL = tl.constexpr(spec.SMALLEST_NORMAL)


TRANSPOSE_TILE = 64
"""Rows and columns of a tile of the transposing kernel."""


@dataclass(frozen=True)
class Configuration:
    """Launch configuration: values per program, warps."""

    tile: int
    num_warps: int


def dequantize_configuration() -> Configuration:
    """Eight values (one word) per thread and step, two steps whose loads are in flight together."""
    return Configuration(2048, 4)


def quantize_configuration(block: int) -> Configuration:
    """32 values per thread. One warp where a block allows it: four that synchronize take 18 % longer."""
    tile = max(block, 1024)
    return Configuration(tile, tile // 1024)


@triton.jit
def flush_subnormals(value):  # type: ignore[no-untyped-def]
    return tl.where(tl.abs(value) < SMALLEST_NORMAL, value * 0.0, value)


@triton.jit
def product(a, b, ON_GPU: tl.constexpr):  # type: ignore[no-untyped-def]
    """a · b, subnormal factors and results flushed; `.rn` keeps the compiler from fusing it with a sum."""
    if ON_GPU:
        return tl.inline_asm_elementwise(
            "mul.rn.ftz.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return flush_subnormals(flush_subnormals(a) * flush_subnormals(b))


@triton.jit
def reciprocal(value, ON_GPU: tl.constexpr):  # type: ignore[no-untyped-def]
    if ON_GPU:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return flush_subnormals(1.0 / value)


@triton.jit
def _maximum(a, b):  # type: ignore[no-untyped-def]
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest_magnitude(value, axis: tl.constexpr):  # type: ignore[no-untyped-def]
    """max |value| along an axis; NaN propagates, so that a later check detects it; subnormals count as zero."""
    return flush_subnormals(tl.reduce(tl.abs(value), axis, _maximum))


@triton.jit
def nibbles_of_words(codes_ptr, word, inside):  # type: ignore[no-untyped-def]
    """The eight codes of each 32-bit word, in order: [W] → int32 [W, 8]. Within a byte the upper nibble is first."""
    words = tl.load(codes_ptr + word, mask=inside, other=0)
    shift = (tl.arange(0, 8) ^ 1) * 4
    return (words[:, None] >> shift[None, :]) & 15


@triton.jit
def nibbles_at(codes_ptr, position, inside):  # type: ignore[no-untyped-def]
    """The code of each position, with one byte load each: for counts and rows that are not a multiple of eight."""
    byte = tl.load(codes_ptr + (position >> 1), mask=inside, other=0).to(tl.int32)
    return (byte >> ((position & 1) ^ 1).to(tl.int32) * 4) & 15


@triton.jit
def look_up(table, nibbles):  # type: ignore[no-untyped-def]
    """table[nibbles] through shared memory: 16 words are in 16 banks, so there are no bank conflicts."""
    flat = tl.gather(table, tl.reshape(nibbles, (nibbles.numel,)), 0)
    return tl.reshape(flat, nibbles.shape)


@triton.jit
def _dequantize_kernel(  # type: ignore[no-untyped-def]
    codes_ptr, absmax_ptr, map_ptr, nested_absmax_ptr, nested_map_ptr, offset_ptr, out_ptr, count,
    LOG_BLOCK: tl.constexpr, LOG_NESTED: tl.constexpr, NESTED: tl.constexpr, NESTED_START: tl.constexpr,
    TILE: tl.constexpr, EVEN: tl.constexpr, BY_WORD: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """A program writes TILE values, eight per thread and step, from one word each.

    NESTED_START: index of the first scale within its block of scales; nonzero only for slices of a tensor.
    """
    WORDS: tl.constexpr = TILE // 8
    start = tl.program_id(0).to(tl.int64) * TILE
    # declared non-contiguous: else a thread would load 16 bytes and pass 12 of them to others through shared memory
    word = tl.max_contiguous(tl.arange(0, WORDS), 1)
    position = tl.arange(0, WORDS)[:, None] * 8 + tl.arange(0, 8)[None, :]
    left = count - start
    table = tl.load(map_ptr + tl.arange(0, 16))
    if BY_WORD:
        inside = word >= 0 if EVEN else word * 8 < left
        nibbles = nibbles_of_words(codes_ptr + (start >> 3), word, inside)
    else:
        inside = word * 8 < left
        nibbles = nibbles_at(codes_ptr + (start >> 1), position, position < left)
    first = start >> LOG_BLOCK
    block = ((start - (first << LOG_BLOCK)).to(tl.int32) + word * 8) >> LOG_BLOCK
    scale = tl.load(absmax_ptr + first + block, mask=inside, other=0)
    if NESTED:
        nested_first = first >> LOG_NESTED
        within = (first - (nested_first << LOG_NESTED)).to(tl.int32) + NESTED_START
        nested = (within + block) >> LOG_NESTED
        nested_scale = tl.load(nested_absmax_ptr + nested_first + nested, mask=inside, other=0.0)
        offset = tl.load(offset_ptr)
    # its barrier is between the loads above and the look-up that waits for one of them; without it the
    # compiler issues the loads of codes only after the scales have arrived
    value = look_up(table, nibbles)
    if NESTED:
        scale = product(tl.load(nested_map_ptr + scale.to(tl.int32)), nested_scale, ON_GPU) + offset
    value = product(value, tl.broadcast_to(scale[:, None], (WORDS, 8)), ON_GPU).to(out_ptr.dtype.element_ty)
    if EVEN:
        tl.store(out_ptr + start + position, value)
    elif BY_WORD:
        tl.store(out_ptr + start + position, value, mask=inside[:, None])
    else:
        tl.store(out_ptr + start + position, value, mask=position < left)


@triton.jit
def _dequantize_transposed_kernel(  # type: ignore[no-untyped-def]
    codes_ptr, absmax_ptr, map_ptr, nested_absmax_ptr, nested_map_ptr, offset_ptr, out_ptr, rows, columns,
    LOG_BLOCK: tl.constexpr, LOG_NESTED: tl.constexpr, NESTED: tl.constexpr, NESTED_START: tl.constexpr,
    R: tl.constexpr, C: tl.constexpr, BY_WORD: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """A program transposes a tile of R rows and C columns; grid (row tiles, column tiles, matrices).

    By word (columns, and so every row's first position, are a multiple of eight) one scale is looked up per eight
    values; else one per value.
    """
    EACH: tl.constexpr = 8 if BY_WORD else 1
    row, column = tl.program_id(0) * R + tl.arange(0, R), tl.program_id(1) * C + tl.arange(0, C)
    part = tl.program_id(1) * (C // EACH) + tl.arange(0, C // EACH)
    matrix = tl.program_id(2).to(tl.int64) * rows * columns
    inside = (row < rows)[:, None] & (part * EACH < columns)[None, :]
    position = (matrix + row.to(tl.int64) * columns)[:, None] + (part * EACH)[None, :]
    table = tl.load(map_ptr + tl.arange(0, 16))
    block = position >> LOG_BLOCK
    scale = tl.load(absmax_ptr + block, mask=inside, other=0)
    if NESTED:
        nested = (block + NESTED_START) >> LOG_NESTED
        nested_scale = tl.load(nested_absmax_ptr + nested, mask=inside, other=0.0)
        offset = tl.load(offset_ptr)
    if BY_WORD:
        words = tl.load(codes_ptr + (position >> 3), mask=inside, other=0)
        shift = (tl.arange(0, 8) ^ 1) * 4
        value = look_up(table, (words[:, :, None] >> shift[None, None, :]) & 15)
    else:
        value = look_up(table, nibbles_at(codes_ptr, position, inside))
    if NESTED:
        scale = product(tl.load(nested_map_ptr + scale.to(tl.int32)), nested_scale, ON_GPU) + offset
    if BY_WORD:
        scale = tl.broadcast_to(scale[:, :, None], (R, C // 8, 8))
    value = tl.reshape(product(value, scale, ON_GPU).to(out_ptr.dtype.element_ty), (R, C))
    target = matrix + column.to(tl.int64)[:, None] * rows + row[None, :]
    tl.store(out_ptr + target, tl.trans(value), mask=(column < columns)[:, None] & (row < rows)[None, :])


@triton.jit
def nearest_code(x, threshold_table, below_table):  # type: ignore[no-untyped-def]
    """The number of thresholds below x: none of 31 bins of [−1, 1] contains two, so one comparison is left.

    The bin is 15 x rounded, from the low bits of a sum without mantissa bits for a fraction. Rounding may put x into
    a neighbouring bin; thresholds are far enough from the edges for either to be correct.
    """
    bin = (x * 15.0 + 12582928.0).to(tl.int32, bitcast=True) & 31  # 1.5 · 2²³ + 16
    return look_up(below_table, bin) + (x > look_up(threshold_table, bin)).to(tl.int32)


@triton.jit
def _quantize_kernel(  # type: ignore[no-untyped-def]
    value_ptr, bins_ptr, codes_ptr, absmax_ptr, count, zero_code,
    BLOCK: tl.constexpr, TILE: tl.constexpr, EVEN: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """A program reads TILE values and writes their codes and the largest magnitude of each block."""
    KS: tl.constexpr = TILE // BLOCK
    start = tl.program_id(0).to(tl.int64) * TILE
    left = count - start
    position = tl.arange(0, KS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    if EVEN:
        value = tl.load(value_ptr + start + position).to(tl.float32)
    else:
        value = tl.load(value_ptr + start + position, mask=position < left, other=0.0).to(tl.float32)
    absmax = largest_magnitude(value, 1)
    scaled = product(value, tl.broadcast_to(reciprocal(absmax, ON_GPU)[:, None], (KS, BLOCK)), ON_GPU)
    threshold_table = tl.load(bins_ptr + tl.arange(0, 32))
    below_table = tl.load(bins_ptr + 32 + tl.arange(0, 32)).to(tl.int32)
    code = nearest_code(scaled, threshold_table, below_table)
    upper, lower = tl.split(tl.reshape(code, (KS, BLOCK // 2, 2)))
    # four bytes per thread, from the eight values that it has read
    byte = tl.arange(0, KS)[:, None] * (BLOCK // 2) + tl.max_contiguous(tl.arange(0, BLOCK // 2), 4)[None, :]
    packed = tl.where((absmax == 0.0)[:, None], zero_code * 17, (upper << 4) | lower).to(tl.uint8)
    block = tl.arange(0, KS)
    if EVEN:
        tl.store(codes_ptr + (start >> 1) + byte, packed)
        tl.store(absmax_ptr + start // BLOCK + block, absmax)
    else:
        tl.store(codes_ptr + (start >> 1) + byte, packed, mask=byte * 2 < left)
        tl.store(absmax_ptr + start // BLOCK + block, absmax, mask=block * BLOCK < left)


@triton.jit
def _quantize_scales_kernel(  # type: ignore[no-untyped-def]
    absmax_ptr, offset_ptr, map_ptr, codes_ptr, nested_absmax_ptr, count,
    BLOCK: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """A program quantizes BLOCK scales: a search over the even entries of the map, then one of three neighbours."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    position = tl.arange(0, BLOCK)
    inside = position < count - start
    offset = tl.load(offset_ptr)
    # 0 past the end: bitsandbytes pads after subtracting the mean
    shifted = tl.where(inside, tl.load(absmax_ptr + start + position, mask=inside, other=0.0) - offset, 0.0)
    largest = largest_magnitude(shifted, 0)
    x = product(shifted, tl.zeros_like(shifted) + reciprocal(largest, ON_GPU), ON_GPU)
    pivot = tl.full((BLOCK,), 127, tl.int32)
    for step in tl.static_range(7):
        pivot = tl.where(x > tl.load(map_ptr + pivot), pivot + (64 >> step), pivot - (64 >> step))
    value = tl.load(map_ptr + pivot)
    above = (value + tl.load(map_ptr + pivot + 1)) * 0.5
    below = (value + tl.load(map_ptr + tl.maximum(pivot - 1, 0))) * 0.5
    up = (x > value) & (x > above)
    down = (x <= value) & (x < below) & (pivot > 0)
    code = tl.where(largest == 0.0, 0, pivot + up.to(tl.int32) - down.to(tl.int32))
    tl.store(codes_ptr + start + position, code.to(tl.uint8), mask=inside)
    tl.store(nested_absmax_ptr + tl.program_id(0), largest)


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Returns a context in which the tensor's device is current, since Triton launches on the current device."""
    if tensor.is_cuda and tensor.device.index != torch.cuda.current_device():
        return torch.cuda.device(tensor.device)
    return nullcontext()


def nested_scales_from(
    nested_absmax_J: torch.Tensor | None, nested_block: int, first_block: int
) -> tuple[torch.Tensor | None, int]:
    """The nested scales of a slice that begins with `first_block` of its tensor, and the slice's start within the first
    nested block. The start is 0, which needs no other compiled kernel, wherever a slice begins with a nested block."""
    if nested_absmax_J is None or first_block == 0:
        return nested_absmax_J, 0
    return nested_absmax_J[first_block // nested_block :], first_block % nested_block


def quantize_blocks(
    weight: torch.Tensor, bins: torch.Tensor, block: int, zero_code: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `impl_reference.quantize_blocks`; `bins` is `spec.bins()` on the weight's device."""
    weight = weight.contiguous()
    count = weight.numel()
    codes = torch.empty((count + 1) // 2, dtype=torch.uint8, device=weight.device)
    absmax_K = torch.empty(spec.num_blocks(count, block), dtype=torch.float32, device=weight.device)
    if not count:
        return codes, absmax_K
    configuration = quantize_configuration(block)
    tile = configuration.tile
    with on_device_of(weight):
        _quantize_kernel[(-(-count // tile),)](
            weight,
            bins,
            codes,
            absmax_K,
            count,
            zero_code,
            BLOCK=block,
            TILE=tile,
            EVEN=count % tile == 0,
            ON_GPU=weight.is_cuda,
            num_warps=configuration.num_warps,
        )
    return codes, absmax_K


def quantize_scales(
    absmax_K: torch.Tensor, offset: torch.Tensor, nested_quant_map: torch.Tensor, block: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `impl_reference.quantize_scales`."""
    count = absmax_K.numel()
    codes = torch.empty(count, dtype=torch.uint8, device=absmax_K.device)
    nested_J = torch.empty(spec.num_blocks(count, block), dtype=torch.float32, device=absmax_K.device)
    if not count:
        return codes, nested_J
    with on_device_of(absmax_K):
        _quantize_scales_kernel[(nested_J.numel(),)](
            absmax_K,
            offset,
            nested_quant_map,
            codes,
            nested_J,
            count,
            BLOCK=block,
            ON_GPU=absmax_K.is_cuda,
            num_warps=4,
        )
    return codes, nested_J


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
    """See `impl_reference.dequantize`."""
    if transposed:
        shape = (*shape[:-2], shape[-1], shape[-2])
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=codes.device)
    count = out.numel()
    if not count:
        return out
    # the codes are loaded as 32-bit words; an unaligned tensor (a view into a file) is read by bytes
    by_word = (shape[-2] if transposed else count) % 8 == 0 and codes.data_ptr() % 4 == 0
    packed = codes.view(torch.int32) if by_word else codes
    nested_absmax_J, nested_start = nested_scales_from(nested_absmax_J, nested_block, first_block)
    arguments = (packed, absmax_K, quant_map, nested_absmax_J, nested_quant_map, offset, out)
    logs = (block.bit_length() - 1, nested_block.bit_length() - 1, nested_absmax_J is not None, nested_start)
    with on_device_of(codes):
        if transposed:
            columns, rows = shape[-2:]
            grid = (-(-rows // TRANSPOSE_TILE), -(-columns // TRANSPOSE_TILE), count // (rows * columns))
            _dequantize_transposed_kernel[grid](
                *arguments,
                rows,
                columns,
                *logs,
                TRANSPOSE_TILE,
                TRANSPOSE_TILE,
                by_word,
                codes.is_cuda,
                num_warps=4,
            )
        else:
            tile = dequantize_configuration().tile
            fixed = (*logs, tile, by_word and count % tile == 0, by_word, codes.is_cuda)
            _launch_dequantize((-(-count // tile), 1, 1), arguments, count, fixed)
    return out


_compiled: dict[tuple[Any, ...], Any] = {}


def _launch_dequantize(
    grid: tuple[int, int, int], pointers: tuple[Any, ...], count: int, fixed: tuple[Any, ...]
) -> None:
    """Launches the kernel; from the second call the compiled one directly: 9 µs of Python instead of 18.

    The cache key contains everything that Triton specializes on: types, alignment, the width of `count`, the constants.
    """
    warps = dequantize_configuration().num_warps
    if not fixed[-1]:
        _dequantize_kernel[grid](*pointers, count, *fixed, num_warps=warps)
        return
    out = pointers[-1]
    aligned = all(pointer is None or pointer.data_ptr() % 16 == 0 for pointer in pointers)
    key = (out.dtype, out.device.index, aligned, count % 16 == 0, count > 1, count < 1 << 31, fixed)
    kernel = _compiled.get(key) if aligned else None
    if kernel is None:
        kernel = _dequantize_kernel[grid](*pointers, count, *fixed, num_warps=warps)
        if aligned:
            _compiled[key] = kernel
    else:
        kernel[grid](*pointers, count, *fixed)
