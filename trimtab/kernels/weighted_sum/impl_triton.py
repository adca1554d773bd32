"""The weighted sum in Triton: a program per tile of rows (forward) or per column tile of a row chunk (backward)."""

# N rows, D elements per row, R rows and C columns of a tile, P chunks of rows

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trimtab.kernels.launching import as_rows, check_device, once_differentiable
from trimtab.kernels.weighted_sum.spec import COLUMNS, ROWS, chunk_rows


@triton.jit
def _forward_kernel(x_ptr, w_ptr, y_ptr, N, D, stride, R: tl.constexpr, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """Computes y for R rows: loops over tiles of C columns and accumulates in fp32."""
    rows = tl.program_id(0) * R + tl.arange(0, R)
    # 64 bits: row · stride exceeds 2³¹ in a tensor of 4 GiB
    starts = x_ptr + rows.to(tl.int64)[:, None] * stride
    sums = tl.zeros((R,), tl.float32)
    for first in range(0, D, C):
        columns = first + tl.arange(0, C)
        inside = (rows < N)[:, None] & (columns < D)[None, :]
        x = tl.load(starts + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        w = tl.load(w_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)
        sums += tl.sum(x * w[None, :], axis=1)
    tl.store(y_ptr + rows, sums, mask=rows < N)


@triton.jit
def _backward_kernel(  # type: ignore[no-untyped-def]
    g_ptr,
    x_ptr,
    w_ptr,
    gx_ptr,
    parts_ptr,
    N,
    D,
    stride,
    CHUNK: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
):
    """Processes C columns of CHUNK rows: writes x's gradient, and one row of partial sums of w's, reduced later."""
    chunk = tl.program_id(0)
    columns = tl.program_id(1) * C + tl.arange(0, C)
    w = tl.load(w_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)
    sums = tl.zeros((C,), tl.float32)
    for first in range(0, CHUNK, R):
        rows = chunk * CHUNK + first + tl.arange(0, R)
        wide = rows.to(tl.int64)[:, None]
        inside = (rows < N)[:, None] & (columns < D)[None, :]
        g = tl.load(g_ptr + rows, mask=rows < N, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + wide * stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(gx_ptr + wide * D + columns[None, :], g[:, None] * w[None, :], mask=inside)
        sums += tl.sum(g[:, None] * x, axis=0)
    tl.store(parts_ptr + chunk.to(tl.int64) * D + columns, sums, mask=columns < D)


def _forward(x: torch.Tensor, w_D: torch.Tensor) -> torch.Tensor:
    check_device(_forward_kernel, x)
    x_ND, w_D = as_rows(x), w_D.contiguous()
    N, D = x_ND.shape
    y_N = torch.empty(N, dtype=x.dtype, device=x.device)
    if N:
        grid = (triton.cdiv(N, ROWS),)
        _forward_kernel[grid](x_ND, w_D, y_N, N, D, x_ND.stride(0), R=ROWS, C=COLUMNS)
    return y_N.view(x.shape[:-1])


def _backward(g: torch.Tensor, x: torch.Tensor, w_D: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    check_device(_backward_kernel, x)
    # the gradient of a sum is one element expanded with strides of 0: materialize it
    g_N, x_ND, w_D = g.reshape(-1).contiguous(), as_rows(x), w_D.contiguous()
    N, D = x_ND.shape
    gx_ND = torch.empty(N, D, dtype=x.dtype, device=x.device)
    chunk = chunk_rows(N)
    parts_PD = torch.empty(triton.cdiv(N, chunk), D, dtype=torch.float32, device=x.device)
    if N and D:
        grid = (triton.cdiv(N, chunk), triton.cdiv(D, COLUMNS))
        _backward_kernel[grid](
            g_N, x_ND, w_D, gx_ND, parts_PD, N, D, x_ND.stride(0), CHUNK=chunk, R=ROWS, C=COLUMNS
        )
    return gx_ND.view(x.shape), parts_PD.sum(0).to(w_D.dtype)


# torch operators: schema (define), implementation (impl), shapes for tracing (fake) and the derivative.
# torch.compile and fake tensors see each as a single call.
torch.library.define("trimtab::weighted_sum", "(Tensor x, Tensor w) -> Tensor")
torch.library.define("trimtab::weighted_sum_backward", "(Tensor g, Tensor x, Tensor w) -> (Tensor, Tensor)")
torch.library.impl("trimtab::weighted_sum", ("cpu", "cuda"), _forward)
torch.library.impl("trimtab::weighted_sum_backward", ("cpu", "cuda"), _backward)


@torch.library.register_fake("trimtab::weighted_sum")
def _(x: torch.Tensor, w_D: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[:-1])


@torch.library.register_fake("trimtab::weighted_sum_backward")
def _(g: torch.Tensor, x: torch.Tensor, w_D: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), w_D.new_empty(w_D.shape)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs)


def _differentiate(ctx, g):  # type: ignore[no-untyped-def]
    return torch.ops.trimtab.weighted_sum_backward(g, *ctx.saved_tensors)


torch.library.register_autograd("trimtab::weighted_sum", _differentiate, setup_context=_setup_context)
torch.library.register_autograd("trimtab::weighted_sum_backward", once_differentiable)


def weighted_sum(x_ND: torch.Tensor, w_D: torch.Tensor) -> torch.Tensor:
    """See `trimtab.kernels.weighted_sum.weighted_sum`."""
    out: torch.Tensor = torch.ops.trimtab.weighted_sum(x_ND, w_D)
    return out
