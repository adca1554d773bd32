"""x · Wᵀ for a few rows of x, with the NF4 weight dequantized inside the product."""

# M rows of x, N output features, K input features, W 32-bit words of eight codes

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from trimtab.kernels.nf4 import impl_triton, spec
from trimtab.kernels.nf4.impl_triton import (  # noqa: F401 (device functions that the kernel's own call)
    flush_subnormals,
    look_up,
    product,
)

NUM_N = {1: 4, 2: 8}
"""Output features of a tile by rows of x: 4 for two rows takes 21.6 µs at 4096×4096 on an H200, 8 takes 18.1."""
NUM_K, NUM_WARPS = 512, 4


@triton.jit
def _row(x_ptr, row: tl.constexpr, x_stride, at_W8, inside_W8):  # type: ignore[no-untyped-def]
    return tl.load(x_ptr + row * x_stride + at_W8, mask=inside_W8, other=0.0)


@triton.jit
def _stored(out_ptr, sum_W8, row: tl.constexpr, n, num_n, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Reduces and stores the sums of N output features, W words each, in one row of the result."""
    sum_NW = tl.reshape(tl.sum(sum_W8, 1), (N, sum_W8.shape[0] // N))
    target = out_ptr + row * num_n + n
    tl.store(target, tl.sum(sum_NW, 1).to(out_ptr.dtype.element_ty), mask=n < num_n)


@triton.jit
def _rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr, codes_ptr, absmax_ptr, map_ptr, nested_absmax_ptr, nested_map_ptr, offset_ptr, out_ptr,
    num_n, num_k, x_stride,
    LOG_BLOCK: tl.constexpr, LOG_NESTED: tl.constexpr, NESTED: tl.constexpr, NESTED_START: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, ON_GPU: tl.constexpr,
):  # fmt: skip
    """One or two rows of x, N output features: multiply-adds on words in the dequantizing kernel's layout.

    A thread accumulates its own eight sums until the end. W counts the words of all N features.
    """
    PER_ROW: tl.constexpr = K // 8
    W: tl.constexpr = N * PER_ROW
    flat, lane = tl.max_contiguous(tl.arange(0, W), 1), tl.arange(0, 8)
    n_W, word_W = tl.program_id(0) * N + flat // PER_ROW, flat % PER_ROW
    table = tl.load(map_ptr + tl.arange(0, 16))
    first_W = n_W.to(tl.int64) * (num_k // 8)
    k_W8 = (tl.arange(0, W) % PER_ROW)[:, None] * 8 + lane[None, :]
    sum_W8 = tl.zeros((W, 8), tl.float32)
    other_W8 = tl.zeros((W, 8), tl.float32)
    for start in range(0, num_k, K):
        at_W = first_W + start // 8 + word_W
        inside_W = (n_W < num_n) & (start // 8 + word_W < num_k // 8)
        words_W = tl.load(codes_ptr + at_W, mask=inside_W, other=0)
        block_W = (at_W * 8) >> LOG_BLOCK
        scale_W = tl.load(absmax_ptr + block_W, mask=inside_W, other=0)
        x_W8 = _row(x_ptr, 0, x_stride, start + k_W8, start + k_W8 < num_k)
        if NESTED:
            at_nested_W = (block_W + NESTED_START) >> LOG_NESTED
            nested_W = tl.load(nested_absmax_ptr + at_nested_W, mask=inside_W, other=0.0)
        value_W8 = look_up(table, (words_W[:, None] >> ((lane ^ 1) * 4)[None, :]) & 15)
        if NESTED:
            coded_W = tl.load(nested_map_ptr + scale_W.to(tl.int32))
            scale_W = product(coded_W, nested_W, ON_GPU) + tl.load(offset_ptr)
        weight_W8 = product(value_W8, tl.broadcast_to(scale_W[:, None], (W, 8)), ON_GPU)
        weight_W8 = weight_W8.to(x_W8.dtype).to(tl.float32)  # rounded as a dequantized weight would be
        sum_W8 += weight_W8 * x_W8.to(tl.float32)
        if M == 2:
            x_W8 = _row(x_ptr, 1, x_stride, start + k_W8, start + k_W8 < num_k)
            other_W8 += weight_W8 * x_W8.to(tl.float32)
    n = tl.program_id(0) * N + tl.arange(0, N)
    _stored(out_ptr, sum_W8, 0, n, num_n, N)
    if M == 2:
        _stored(out_ptr, other_W8, 1, n, num_n, N)


def matmul(
    x: torch.Tensor,
    codes: torch.Tensor,
    absmax: torch.Tensor,
    quant_map: torch.Tensor,
    nested_absmax: torch.Tensor | None,
    nested_quant_map: torch.Tensor | None,
    offset: torch.Tensor | None,
    shape: Any,
    block: int,
    nested_block: int,
    first_block: int = 0,
) -> torch.Tensor:
    """[..., K] → [..., N]: fused for few rows, else dequantized and multiplied by torch. `first_block` as in
    `impl_reference.dequantize`."""
    num_n, num_k = shape
    rows = x.numel() // num_k if num_k else 0
    state = (codes, absmax, quant_map, nested_absmax, nested_quant_map, offset)
    if not (0 < rows <= spec.FUSED_ROWS and num_k % 8 == 0 and codes.data_ptr() % 4 == 0):
        weight_NK = impl_triton.dequantize(
            *state, (num_n, num_k), x.dtype, block, nested_block, first_block=first_block
        )
        return torch.nn.functional.linear(x, weight_NK)
    x_MK = x.reshape(rows, num_k)
    if x_MK.stride(1) != 1:
        x_MK = x_MK.contiguous()
    out_MN = torch.empty((rows, num_n), dtype=x.dtype, device=x.device)
    nested_absmax, nested_start = impl_triton.nested_scales_from(nested_absmax, nested_block, first_block)
    with impl_triton.on_device_of(x):
        _rows_kernel[(-(-num_n // NUM_N[rows]),)](
            x_MK,
            codes.view(torch.int32),
            absmax,
            quant_map,
            nested_absmax,
            nested_quant_map,
            offset,
            out_MN,
            num_n,
            num_k,
            x_MK.stride(0),
            LOG_BLOCK=block.bit_length() - 1,
            LOG_NESTED=nested_block.bit_length() - 1,
            NESTED=nested_absmax is not None,
            NESTED_START=nested_start,
            M=rows,
            N=NUM_N[rows],
            K=NUM_K,
            ON_GPU=x.is_cuda,
            num_warps=NUM_WARPS,
        )
    return out_MN.view(*x.shape[:-1], num_n)
