"""The norm of a branch before the residual addition, and the norm that follows, in Triton.

One kernel in the forward. The backward of norm and addition alone is `rms_norm`'s; with a norm after them, one kernel
computes the gradient of both norms. Partial sums of the weights' gradients are reduced in a fixed order, as in
`impl_triton`.
"""

# N rows, D elements per row, R rows and C ≥ D columns of a tile, P programs; 1 the branch's norm, 2 the next one

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trimtab.kernels.launching import as_rows, capability_of, check_device, once_differentiable
from trimtab.kernels.partial_sums import sum_partials
from trimtab.kernels.rms_norm.impl_triton import check_width, row_scales
from trimtab.kernels.rms_norm.spec import backward_configuration, forward_configuration


@triton.jit
def _rms_norm_branch_forward_kernel(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, w1_ptr, w2_ptr, h_ptr, y_ptr, scale1_ptr, scale2_ptr,
    N, D, stride_x, stride_residual, eps,
    NEXT: tl.constexpr, OFFSET: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * R + tl.arange(0, R)
    columns = tl.arange(0, C)[None, :]
    wide = rows.to(tl.int64)[:, None]  # row · stride exceeds 2³¹ in a large tensor
    inside = (rows < N)[:, None] & (columns < D)
    x = tl.load(x_ptr + wide * stride_x + columns, mask=inside, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + wide * stride_residual + columns, mask=inside, other=0.0).to(tl.float32)
    scale1 = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)
    w1 = tl.load(w1_ptr + columns, mask=columns < D, other=0.0).to(tl.float32) + OFFSET
    rounded = (residual + x * scale1[:, None] * w1).to(h_ptr.dtype.element_ty)
    tl.store(h_ptr + wide * D + columns, rounded, mask=inside)
    tl.store(scale1_ptr + rows, scale1, mask=rows < N)
    if NEXT:
        h = rounded.to(tl.float32)  # the norm is of the rounded residual stream
        scale2 = tl.rsqrt(tl.sum(h * h, axis=1) / D + eps)
        w2 = tl.load(w2_ptr + columns, mask=columns < D, other=0.0).to(tl.float32) + OFFSET
        tl.store(y_ptr + wide * D + columns, h * scale2[:, None] * w2, mask=inside)
        tl.store(scale2_ptr + rows, scale2, mask=rows < N)


@triton.jit
def _rms_norm_branch_backward_kernel(  # type: ignore[no-untyped-def]
    gy_ptr, gh_ptr, x_ptr, h_ptr, w1_ptr, w2_ptr, scale1_ptr, scale2_ptr, x_out_ptr, h_out_ptr, parts_ptr,
    N, D, P, stride_gy, stride_gh, stride_x, stride_h,
    HAS_GH: tl.constexpr, WEIGHT_GRAD: tl.constexpr, OFFSET: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    columns = tl.arange(0, C)[None, :]
    sums1 = tl.zeros((R, C), tl.float32)
    sums2 = tl.zeros((R, C), tl.float32)
    for tile in range(program, tl.cdiv(N, R), P):
        rows = tile * R + tl.arange(0, R)
        wide = rows.to(tl.int64)[:, None]
        inside = (rows < N)[:, None] & (columns < D)
        gy = tl.load(gy_ptr + wide * stride_gy + columns, mask=inside, other=0.0).to(tl.float32)
        unit = tl.load(h_ptr + wide * stride_h + columns, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scale2_ptr + rows, mask=rows < N, other=0.0)[:, None]
        unit *= scale
        if WEIGHT_GRAD:
            sums2 += gy * unit
        # weights are read from the cache for each tile: registers hold both partial sums instead
        gy *= tl.load(w2_ptr + columns, mask=columns < D, other=0.0).to(tl.float32) + OFFSET
        g = (gy - unit * (tl.sum(gy * unit, axis=1)[:, None] / D)) * scale
        if HAS_GH:
            g += tl.load(gh_ptr + wide * stride_gh + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(h_out_ptr + wide * D + columns, g, mask=inside)
        unit = tl.load(x_ptr + wide * stride_x + columns, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scale1_ptr + rows, mask=rows < N, other=0.0)[:, None]
        unit *= scale
        if WEIGHT_GRAD:
            sums1 += g * unit
        g *= tl.load(w1_ptr + columns, mask=columns < D, other=0.0).to(tl.float32) + OFFSET
        g = (g - unit * (tl.sum(g * unit, axis=1)[:, None] / D)) * scale
        tl.store(x_out_ptr + wide * D + columns, g, mask=inside)
    if WEIGHT_GRAD:
        ends = tl.arange(0, C)
        tl.store(parts_ptr + program * D + ends, tl.sum(sums1, axis=0), mask=ends < D)
        tl.store(parts_ptr + (P + program) * D + ends, tl.sum(sums2, axis=0), mask=ends < D)


def _forward(
    x: torch.Tensor,
    residual: torch.Tensor,
    w1_D: torch.Tensor,
    w2_D: torch.Tensor | None,
    eps: float,
    offset: float,
) -> tuple[torch.Tensor, ...]:
    check_device(_rms_norm_branch_forward_kernel, x)
    x_ND, residual_ND, w1_D = as_rows(x), as_rows(residual), w1_D.contiguous()
    N, D = x_ND.shape
    check_width(D)
    h = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    y = None if w2_D is None else torch.empty_like(h)
    scale1_N = torch.empty(N, dtype=torch.float32, device=x.device)
    scale2_N = None if w2_D is None else torch.empty_like(scale1_N)
    if N and D:
        chosen = forward_configuration(D, capability_of(x))
        _rms_norm_branch_forward_kernel[(triton.cdiv(N, chosen.rows),)](
            x_ND, residual_ND, w1_D, None if w2_D is None else w2_D.contiguous(), h, y, scale1_N, scale2_N,
            N, D, x_ND.stride(0), residual_ND.stride(0), eps,
            NEXT=w2_D is not None, OFFSET=offset, R=chosen.rows, C=chosen.columns, num_warps=chosen.warps,
        )  # fmt: skip
    return (h, scale1_N) if y is None or scale2_N is None else (y, h, scale1_N, scale2_N)


def _norm_add(
    x: torch.Tensor, residual: torch.Tensor, w_D: torch.Tensor, eps: float, offset: float = 0.0
) -> tuple[torch.Tensor, ...]:
    return _forward(x, residual, w_D, None, eps, offset)


def _norm_add_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    w1_D: torch.Tensor,
    w2_D: torch.Tensor,
    eps: float,
    offset: float = 0.0,
) -> tuple[torch.Tensor, ...]:
    return _forward(x, residual, w1_D, w2_D, eps, offset)


def _backward(
    gy: torch.Tensor,
    gh: torch.Tensor | None,
    x: torch.Tensor,
    h: torch.Tensor,
    w1_D: torch.Tensor,
    w2_D: torch.Tensor,
    scale1_N: torch.Tensor,
    scale2_N: torch.Tensor,
    weight_grad: bool,
    offset: float = 0.0,
) -> tuple[torch.Tensor, ...]:
    check_device(_rms_norm_branch_backward_kernel, h)
    gy_ND, x_ND, h_ND = as_rows(gy), as_rows(x), as_rows(h)
    gh_ND = None if gh is None else as_rows(gh)
    N, D = h_ND.shape
    x_out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    h_out = torch.empty_like(x_out)
    if not (N and D):
        return x_out, h_out, *(w.new_zeros(w.shape if weight_grad else 0) for w in (w1_D, w2_D))
    chosen = backward_configuration(D, capability_of(h))
    P = min(chosen.programs, triton.cdiv(N, chosen.rows))
    parts_2PD = torch.empty(2, P if weight_grad else 0, D, dtype=torch.float32, device=h.device)
    _rms_norm_branch_backward_kernel[(P,)](
        gy_ND, gh_ND, x_ND, h_ND, w1_D.contiguous(), w2_D.contiguous(), scale1_N, scale2_N,
        x_out, h_out, parts_2PD, N, D, P,
        gy_ND.stride(0), 0 if gh_ND is None else gh_ND.stride(0), x_ND.stride(0), h_ND.stride(0),
        HAS_GH=gh is not None, WEIGHT_GRAD=weight_grad, OFFSET=offset,
        R=chosen.rows, C=chosen.columns, num_warps=chosen.warps,
    )  # fmt: skip
    if not weight_grad:
        return x_out, h_out, w1_D.new_empty(0), w2_D.new_empty(0)
    return x_out, h_out, sum_partials(parts_2PD[0], w1_D.dtype), sum_partials(parts_2PD[1], w2_D.dtype)


torch.library.define(
    "trimtab::norm_add",
    "(Tensor x, Tensor residual, Tensor w, float eps, float offset=0.0) -> (Tensor, Tensor)",
)
torch.library.define(
    "trimtab::norm_add_norm",
    "(Tensor x, Tensor residual, Tensor w1, Tensor w2, float eps, float offset=0.0) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)
torch.library.define(
    "trimtab::norm_add_norm_backward",
    "(Tensor gy, Tensor? gh, Tensor x, Tensor h, Tensor w1, Tensor w2, Tensor scale1, Tensor scale2, "
    "bool weight_grad, float offset=0.0) -> (Tensor, Tensor, Tensor, Tensor)",
)
torch.library.impl("trimtab::norm_add", ("cpu", "cuda"), _norm_add)
torch.library.impl("trimtab::norm_add_norm", ("cpu", "cuda"), _norm_add_norm)
torch.library.impl("trimtab::norm_add_norm_backward", ("cpu", "cuda"), _backward)


@torch.library.register_fake("trimtab::norm_add")
def _(x, residual, w, eps, offset=0.0):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape), row_scales(x)


@torch.library.register_fake("trimtab::norm_add_norm")
def _(x, residual, w1, w2, eps, offset=0.0):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape), x.new_empty(x.shape), row_scales(x), row_scales(x)


@torch.library.register_fake("trimtab::norm_add_norm_backward")
def _(gy, gh, x, h, w1, w2, scale1, scale2, weight_grad, offset=0.0):  # type: ignore[no-untyped-def]
    weights = (w.new_empty(w.shape if weight_grad else 0) for w in (w1, w2))
    return x.new_empty(x.shape), x.new_empty(x.shape), *weights


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, _, w, _, ctx.offset = inputs
    ctx.save_for_backward(x, w, output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx, gh, _):  # type: ignore[no-untyped-def]
    x, w, scale = ctx.saved_tensors
    if gh is None:
        return None, None, None, None, None
    weight_grad = ctx.needs_input_grad[2]
    gx, gw = torch.ops.trimtab.rms_norm_backward(gh, None, x, w, scale, weight_grad, ctx.offset)
    return gx, gh, gw if weight_grad else None, None, None


def _setup_both_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, _, w1, w2, _, ctx.offset = inputs
    _, h, scale1, scale2 = output
    ctx.save_for_backward(x, h, w1, w2, scale1, scale2)
    ctx.set_materialize_grads(False)


def _differentiate_both(ctx, gy, gh, *_):  # type: ignore[no-untyped-def]
    x, h, w1, w2, scale1, scale2 = ctx.saved_tensors
    first, second = ctx.needs_input_grad[2:4]
    gw1 = gw2 = None
    if gy is not None:
        gx, gh, gw1, gw2 = torch.ops.trimtab.norm_add_norm_backward(
            gy, gh, x, h, w1, w2, scale1, scale2, first or second, ctx.offset
        )
    elif gh is not None:  # the norm that follows has no gradient
        gx, gw1 = torch.ops.trimtab.rms_norm_backward(gh, None, x, w1, scale1, first, ctx.offset)
    else:
        gx = None
    return gx, gh, gw1 if first else None, gw2 if second else None, None, None


torch.library.register_autograd("trimtab::norm_add", _differentiate, setup_context=_setup_context)
torch.library.register_autograd(
    "trimtab::norm_add_norm", _differentiate_both, setup_context=_setup_both_context
)
torch.library.register_autograd("trimtab::norm_add_norm_backward", once_differentiable)


def norm_add(
    branch: torch.Tensor, residual: torch.Tensor, weight_D: torch.Tensor, eps: float, offset: float
) -> torch.Tensor:
    """See `trimtab.kernels.rms_norm.norm_add`."""
    h: torch.Tensor = torch.ops.trimtab.norm_add(branch, residual, weight_D, eps, offset)[0]
    return h


def norm_add_norm(
    branch: torch.Tensor,
    residual: torch.Tensor,
    weight_D: torch.Tensor,
    next_weight_D: torch.Tensor,
    eps: float,
    offset: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `trimtab.kernels.rms_norm.norm_add_norm`."""
    y, h, _, _ = torch.ops.trimtab.norm_add_norm(branch, residual, weight_D, next_weight_D, eps, offset)
    return y, h
