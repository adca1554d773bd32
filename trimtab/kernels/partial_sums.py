"""Reduction of partial sums, one row per program, in a fixed order: weight gradients without atomics."""

# P partial sums, D elements

from __future__ import annotations

import torch
import triton
import triton.language as tl

ROWS, COLUMNS = 32, 32


@triton.jit
def _sum_kernel(parts_ptr, out_ptr, P, D, R: tl.constexpr, C: tl.constexpr):  # type: ignore[no-untyped-def]
    columns = tl.program_id(0) * C + tl.arange(0, C)
    rows = tl.arange(0, R)
    sums = tl.zeros((R, C), tl.float32)
    for first in range(0, P, R):
        inside = ((first + rows) < P)[:, None] & (columns < D)[None, :]
        sums += tl.load(parts_ptr + (first + rows)[:, None] * D + columns[None, :], mask=inside, other=0.0)
    tl.store(out_ptr + columns, tl.sum(sums, axis=0), mask=columns < D)


def sum_partials(parts_PD: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[D] in `dtype`: the sum over P of fp32 parts_PD (contiguous, fewer than 2³¹ elements), accumulated in fp32."""
    P, D = parts_PD.shape
    out_D = torch.empty(D, dtype=dtype, device=parts_PD.device)
    _sum_kernel[(triton.cdiv(D, COLUMNS),)](parts_PD, out_D, P, D, R=ROWS, C=COLUMNS)
    return out_D
