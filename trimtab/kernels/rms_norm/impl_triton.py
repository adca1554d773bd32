"""The norm in Triton: a tile of whole rows in registers, each element read once and written once.

The backward runs a fixed number of programs; each loops over its tiles, accumulates its partial sum of the weight's
gradient in registers and writes it once. The partial sums are reduced in a fixed order, so results are deterministic.
"""

# N rows, D elements per row, R rows and C ≥ D columns of a tile, P programs

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from trimtab.facts.errors import ModelError
from trimtab.kernels.launching import as_rows, capability_of, check_device, once_differentiable
from trimtab.kernels.partial_sums import sum_partials
from trimtab.kernels.rms_norm.spec import MAX_COLUMNS, backward_configuration, forward_configuration


@triton.jit
def _rms_norm_forward_kernel(  # type: ignore[no-untyped-def]
    x_ptr, residual_ptr, w_ptr, y_ptr, h_ptr, scale_ptr, N, D, stride_x, stride_residual, eps,
    HAS_RESIDUAL: tl.constexpr, OFFSET: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * R + tl.arange(0, R)
    columns = tl.arange(0, C)[None, :]
    wide = rows.to(tl.int64)[:, None]  # row · stride exceeds 2³¹ in a large tensor
    inside = (rows < N)[:, None] & (columns < D)
    x = tl.load(x_ptr + wide * stride_x + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + wide * stride_residual + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + wide * D + columns, rounded, mask=inside)
        x = rounded.to(tl.float32)  # the norm is of the rounded residual stream
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)
    w = tl.load(w_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)
    if OFFSET != 0:
        w += OFFSET
    tl.store(y_ptr + wide * D + columns, x * scale[:, None] * w, mask=inside)
    tl.store(scale_ptr + rows, scale, mask=rows < N)


@triton.jit
def _rms_norm_backward_kernel(  # type: ignore[no-untyped-def]
    gy_ptr, gh_ptr, h_ptr, w_ptr, scale_ptr, out_ptr, parts_ptr, N, D, P, stride_gy, stride_gh, stride_h,
    HAS_GH: tl.constexpr, WEIGHT_GRAD: tl.constexpr, OFFSET: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    columns = tl.arange(0, C)[None, :]
    w = tl.load(w_ptr + columns, mask=columns < D, other=0.0).to(tl.float32)
    if OFFSET != 0:
        w += OFFSET
    sums = tl.zeros((R, C), tl.float32)
    for tile in range(program, tl.cdiv(N, R), P):
        rows = tile * R + tl.arange(0, R)
        wide = rows.to(tl.int64)[:, None]
        inside = (rows < N)[:, None] & (columns < D)
        gy = tl.load(gy_ptr + wide * stride_gy + columns, mask=inside, other=0.0).to(tl.float32)
        h = tl.load(h_ptr + wide * stride_h + columns, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(scale_ptr + rows, mask=rows < N, other=0.0)[:, None]
        unit = h * scale
        along = tl.sum(gy * w * unit, axis=1)[:, None] / D
        out = (gy * w - unit * along) * scale
        if HAS_GH:
            out += tl.load(gh_ptr + wide * stride_gh + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + wide * D + columns, out, mask=inside)
        if WEIGHT_GRAD:
            sums += gy * unit
    if WEIGHT_GRAD:
        ends = tl.arange(0, C)
        tl.store(parts_ptr + program * D + ends, tl.sum(sums, axis=0), mask=ends < D)


def check_width(D: int) -> None:
    """Raises for rows that do not fit into the registers of one program."""
    if D > MAX_COLUMNS:
        raise ModelError(
            f"the fused norm supports rows of up to {MAX_COLUMNS:,} elements, not {D:,}", "use 'reference'"
        )


def _forward(
    x: torch.Tensor, residual: torch.Tensor | None, w_D: torch.Tensor, eps: float, offset: float = 0.0
) -> tuple[torch.Tensor, ...]:
    check_device(_rms_norm_forward_kernel, x)
    x_ND, w_D = as_rows(x), w_D.contiguous()
    residual_ND = None if residual is None else as_rows(residual)
    N, D = x_ND.shape
    check_width(D)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    h = None if residual is None else torch.empty_like(y)
    scale_N = torch.empty(N, dtype=torch.float32, device=x.device)
    if N and D:
        chosen = forward_configuration(D, capability_of(x))
        _rms_norm_forward_kernel[(triton.cdiv(N, chosen.rows),)](
            x_ND, residual_ND, w_D, y, h, scale_N, N, D, x_ND.stride(0),
            0 if residual_ND is None else residual_ND.stride(0), eps,
            HAS_RESIDUAL=residual is not None, OFFSET=offset, R=chosen.rows, C=chosen.columns, num_warps=chosen.warps,
        )  # fmt: skip
    return (y, scale_N) if h is None else (y, h, scale_N)


def _norm(x: torch.Tensor, w_D: torch.Tensor, eps: float, offset: float = 0.0) -> tuple[torch.Tensor, ...]:
    return _forward(x, None, w_D, eps, offset)


def _backward(
    gy: torch.Tensor,
    gh: torch.Tensor | None,
    h: torch.Tensor,
    w_D: torch.Tensor,
    scale_N: torch.Tensor,
    weight_grad: bool,
    offset: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_device(_rms_norm_backward_kernel, h)
    gy_ND, h_ND, w_D = as_rows(gy), as_rows(h), w_D.contiguous()
    gh_ND = None if gh is None else as_rows(gh)
    N, D = h_ND.shape
    out = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    if not (N and D):
        return out, w_D.new_zeros(w_D.shape if weight_grad else 0)
    chosen = backward_configuration(D, capability_of(h))
    P = min(chosen.programs, triton.cdiv(N, chosen.rows))
    parts_PD = torch.empty(P if weight_grad else 0, D, dtype=torch.float32, device=h.device)
    _rms_norm_backward_kernel[(P,)](
        gy_ND, gh_ND, h_ND, w_D, scale_N, out, parts_PD, N, D, P, gy_ND.stride(0),
        0 if gh_ND is None else gh_ND.stride(0), h_ND.stride(0),
        HAS_GH=gh is not None, WEIGHT_GRAD=weight_grad, OFFSET=offset,
        R=chosen.rows, C=chosen.columns, num_warps=chosen.warps,
    )  # fmt: skip
    return out, sum_partials(parts_PD, w_D.dtype) if weight_grad else w_D.new_empty(0)


torch.library.define(
    "trimtab::rms_norm", "(Tensor x, Tensor w, float eps, float offset=0.0) -> (Tensor, Tensor)"
)
torch.library.define(
    "trimtab::add_rms_norm",
    "(Tensor x, Tensor residual, Tensor w, float eps, float offset=0.0) -> (Tensor, Tensor, Tensor)",
)
torch.library.define(
    "trimtab::rms_norm_backward",
    "(Tensor gy, Tensor? gh, Tensor h, Tensor w, Tensor scale, bool weight_grad, float offset=0.0) "
    "-> (Tensor, Tensor)",
)
torch.library.impl("trimtab::rms_norm", ("cpu", "cuda"), _norm)
torch.library.impl("trimtab::add_rms_norm", ("cpu", "cuda"), _forward)
torch.library.impl("trimtab::rms_norm_backward", ("cpu", "cuda"), _backward)


def row_scales(x: torch.Tensor) -> torch.Tensor:
    """An empty fp32 tensor for the scale of each row."""
    # Not shape.numel(): that would specialize a dimension that is dynamic under torch.compile.
    return x.new_empty(math.prod(x.shape[:-1]), dtype=torch.float32)


@torch.library.register_fake("trimtab::rms_norm")
def _(x, w, eps, offset=0.0):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape), row_scales(x)


@torch.library.register_fake("trimtab::add_rms_norm")
def _(x, residual, w, eps, offset=0.0):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape), x.new_empty(x.shape), row_scales(x)


@torch.library.register_fake("trimtab::rms_norm_backward")
def _(gy, gh, h, w, scale, weight_grad, offset=0.0):  # type: ignore[no-untyped-def]
    return h.new_empty(h.shape), w.new_empty(w.shape if weight_grad else 0)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    x, w, _, ctx.offset = inputs
    ctx.save_for_backward(x, w, output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx, gy, _):  # type: ignore[no-untyped-def]
    x, w, scale = ctx.saved_tensors
    if gy is None:
        return None, None, None, None
    weight_grad = ctx.needs_input_grad[1]
    out, gw = torch.ops.trimtab.rms_norm_backward(gy, None, x, w, scale, weight_grad, ctx.offset)
    return out, gw if weight_grad else None, None, None


def _setup_sum_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, _, w, _, ctx.offset = inputs
    ctx.save_for_backward(output[1], w, output[2])
    ctx.set_materialize_grads(False)


def _differentiate_sum(ctx, gy, gh, _):  # type: ignore[no-untyped-def]
    h, w, scale = ctx.saved_tensors
    if gy is None:
        return gh, gh, None, None, None
    weight_grad = ctx.needs_input_grad[2]
    out, gw = torch.ops.trimtab.rms_norm_backward(gy, gh, h, w, scale, weight_grad, ctx.offset)
    return out, out, gw if weight_grad else None, None, None


torch.library.register_autograd("trimtab::rms_norm", _differentiate, setup_context=_setup_context)
torch.library.register_autograd("trimtab::add_rms_norm", _differentiate_sum, setup_context=_setup_sum_context)
torch.library.register_autograd("trimtab::rms_norm_backward", once_differentiable)


def rms_norm(x: torch.Tensor, weight_D: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    """See `trimtab.kernels.rms_norm.rms_norm`."""
    y: torch.Tensor = torch.ops.trimtab.rms_norm(x, weight_D, eps, offset)[0]
    return y


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight_D: torch.Tensor, eps: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `trimtab.kernels.rms_norm.add_rms_norm`."""
    y, h, _ = torch.ops.trimtab.add_rms_norm(x, residual, weight_D, eps, offset)
    return y, h
