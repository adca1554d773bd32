"""RoPE in Triton: one program per token, queries and keys in one launch, both elements of a pair in one thread.

The backward without norms is the same kernel with the sign of the sine flipped. With norms, a fixed number of programs
loops over the tokens and accumulates partial sums of the weights' gradients in registers, as in `rms_norm`.
"""

# N tokens, H query heads, K key heads, D head size, F = D / 2 pairs (all rotated, or the first ROTATED of them);
# BH, BK, BF: H, K and F of a tile

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trimtab.kernels.launching import capability_of, check_device, once_differentiable
from trimtab.kernels.rms_norm.impl_triton import check_width
from trimtab.kernels.rope.spec import configuration

OPTIONS = "float offset=0.0, bool all_heads=False, bool interleaved=False"
SCHEMA = "(Tensor q, Tensor k, Tensor cos, Tensor sin, bool back, bool interleaved=False) -> (Tensor, Tensor)"
NORMED_SCHEMA = (
    "(Tensor q, Tensor k, Tensor cos, Tensor sin, Tensor q_weight, Tensor k_weight, float eps, "
    f"{OPTIONS}) -> (Tensor, Tensor)"
)
NORMED_BACKWARD_SCHEMA = (
    "(Tensor gq, Tensor gk, Tensor q, Tensor k, Tensor cos, Tensor sin, Tensor q_weight, Tensor k_weight, "
    f"float eps, {OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)"
)


@triton.jit
def _halves(f, F, ROTATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Offset of the first element of pair f in a head, and the distance to the second.

    Pairs from ROTATED on are not rotated: they are the two halves of the rest.
    """
    if ROTATED:
        first = f + tl.where(f < ROTATED, 0, ROTATED)
        gap = tl.where(f < ROTATED, ROTATED, F - ROTATED)
    else:
        first, gap = f, F
    return first, gap


@triton.jit
def _load_pairs(  # type: ignore[no-untyped-def]
    ptr, head, H, stride_h, F, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr, BF: tl.constexpr
):
    """Loads both elements of the pairs of heads [rows, 1]: two tensors [rows, BF] of fp32."""
    if INTERLEAVED:  # read as whole vectors and separated in registers
        d = tl.arange(0, 2 * BF)[None, :]
        x = tl.load(ptr + head * stride_h + d, mask=(head < H) & (d < 2 * F), other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, (x.shape[0], BF, 2)))
    else:
        f = tl.arange(0, BF)[None, :]
        inside = (head < H) & (f < F)
        first, gap = _halves(f, F, ROTATED)
        at = ptr + head * stride_h + first
        a = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(at + gap, mask=inside, other=0.0).to(tl.float32)
    return a, b


@triton.jit
def _store_interleaved(row_ptr, inside_row, a, b, F, BF: tl.constexpr):  # type: ignore[no-untyped-def]
    """Writes pairs [rows, BF] as neighbours, in whole vectors."""
    d = tl.arange(0, 2 * BF)[None, :]
    tl.store(row_ptr + d, tl.interleave(a, b), mask=inside_row & (d < 2 * F))


@triton.jit
def _angles(cos_ptr, sin_ptr, n, f, F, ROTATED: tl.constexpr):  # type: ignore[no-untyped-def]
    """A token's cosines and sines; 1 and 0 for pairs that are not rotated."""
    if ROTATED:
        cos = tl.load(cos_ptr + n * ROTATED + f, mask=f < ROTATED, other=1.0)
        sin = tl.load(sin_ptr + n * ROTATED + f, mask=f < ROTATED, other=0.0)
    else:
        cos = tl.load(cos_ptr + n * F + f, mask=f < F, other=0.0)
        sin = tl.load(sin_ptr + n * F + f, mask=f < F, other=0.0)
    return cos, sin


@triton.jit
def _apply_norm_weights(  # type: ignore[no-untyped-def]
    a, b, scale, w_ptr, head, H, F,
    OFFSET: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Multiplies pairs by their row's scale and their weights: each head's own, or head 0's for all."""
    if INTERLEAVED:
        wa, wb = _load_pairs(w_ptr, head, H, 2 * F, F, ROTATED, INTERLEAVED, BF)
        a *= scale * (wa + OFFSET)
        b *= scale * (wb + OFFSET)
    else:
        f = tl.arange(0, BF)[None, :]
        inside = (head < H) & (f < F)
        first, gap = _halves(f, F, ROTATED)
        at = w_ptr + head * (2 * F) + first
        # one weight after the other, the order that was timed; `_load_weights` here would change it
        wa = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        if OFFSET != 0:
            wa += OFFSET
        a *= scale * wa
        wb = tl.load(at + gap, mask=inside, other=0.0).to(tl.float32)
        if OFFSET != 0:
            wb += OFFSET
        b *= scale * wb
    return a, b


@triton.jit
def _rotate(  # type: ignore[no-untyped-def]
    x_ptr, out_ptr, w_ptr, stride_h, cos, sin, eps, H, F,
    NORM: tl.constexpr, OFFSET: tl.constexpr, ALL_HEADS: tl.constexpr, ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, BH: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Rotates all heads of one token of one tensor; with ALL_HEADS they are one tile."""
    f = tl.arange(0, BF)[None, :]
    for first in range(0, H, BH):
        head = first + tl.arange(0, BH)[:, None]
        a, b = _load_pairs(x_ptr, head, H, stride_h, F, ROTATED, INTERLEAVED, BF)
        if NORM:
            squares = tl.sum(a * a + b * b, axis=1)
            if ALL_HEADS:
                scale = tl.rsqrt(tl.sum(squares, axis=0) / (2 * F * H) + eps)
                a, b = _apply_norm_weights(a, b, scale, w_ptr, head, H, F, OFFSET, ROTATED, INTERLEAVED, BF)
            else:
                scale = tl.rsqrt(squares / (2 * F) + eps)[:, None]
                a, b = _apply_norm_weights(a, b, scale, w_ptr, 0, 1, F, OFFSET, ROTATED, INTERLEAVED, BF)
        row_ptr = out_ptr + head * (2 * F)
        if INTERLEAVED:
            _store_interleaved(row_ptr, head < H, a * cos - b * sin, b * cos + a * sin, F, BF)
        else:
            at, gap = _halves(f, F, ROTATED)
            inside = (head < H) & (f < F)
            tl.store(row_ptr + at, a * cos - b * sin, mask=inside)
            tl.store(row_ptr + at + gap, b * cos + a * sin, mask=inside)


@triton.jit
def _rope_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, cos_ptr, sin_ptr, qw_ptr, kw_ptr, q_out_ptr, k_out_ptr,
    stride_qn, stride_qh, stride_kn, stride_kh, eps, H, K, F,
    BACK: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr, ALL_HEADS: tl.constexpr, ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    f = tl.arange(0, BF)[None, :]
    cos, sin = _angles(cos_ptr, sin_ptr, n, f, F, ROTATED)
    if BACK:
        sin = -sin
    D = 2 * F
    _rotate(
        q_ptr + n * stride_qn, q_out_ptr + n * H * D, qw_ptr, stride_qh, cos, sin, eps, H, F,
        NORM, OFFSET, ALL_HEADS, ROTATED, INTERLEAVED, BH, BF,
    )  # fmt: skip
    _rotate(
        k_ptr + n * stride_kn, k_out_ptr + n * K * D, kw_ptr, stride_kh, cos, sin, eps, K, F,
        NORM, OFFSET, ALL_HEADS, ROTATED, INTERLEAVED, BK, BF,
    )  # fmt: skip


@triton.jit
def _load_weights(  # type: ignore[no-untyped-def]
    w_ptr, H, F, OFFSET: tl.constexpr, ALL_HEADS: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    BH: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Loads the weights of pairs: [BH, BF] for each head, or [1, BF] for all."""
    if ALL_HEADS:
        wa, wb = _load_pairs(w_ptr, tl.arange(0, BH)[:, None], H, 2 * F, F, ROTATED, INTERLEAVED, BF)
    elif INTERLEAVED:
        wa, wb = _load_pairs(w_ptr, 0, 1, 0, F, ROTATED, INTERLEAVED, BF)
    else:
        f = tl.arange(0, BF)[None, :]
        first, gap = _halves(f, F, ROTATED)
        wa = tl.load(w_ptr + first, mask=f < F, other=0.0).to(tl.float32)
        wb = tl.load(w_ptr + gap + first, mask=f < F, other=0.0).to(tl.float32)
    if OFFSET != 0:
        wa += OFFSET
        wb += OFFSET
    return wa, wb


@triton.jit
def _rotate_backward(  # type: ignore[no-untyped-def]
    g_ptr, x_ptr, cos_ptr, sin_ptr, w_ptr, out_ptr, part_ptr, stride_gn, stride_gh, stride_xn, stride_xh, eps,
    program, P, N, H, F, OFFSET: tl.constexpr, ALL_HEADS: tl.constexpr, ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr, BH: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """One program's tokens of one tensor: the gradient before norm and rotation, and a partial sum of the weight's."""
    f = tl.arange(0, BF)[None, :]
    wa, wb = _load_weights(w_ptr, H, F, OFFSET, ALL_HEADS, ROTATED, INTERLEAVED, BH, BF)
    sum_a = tl.zeros((BH, BF), tl.float32)
    sum_b = tl.zeros((BH, BF), tl.float32)
    for token in range(program, N, P):
        n = tl.cast(token, tl.int64)
        cos, sin = _angles(cos_ptr, sin_ptr, n, f, F, ROTATED)
        for first in range(0, H, BH):
            head = first + tl.arange(0, BH)[:, None]
            ga, gb = _load_pairs(g_ptr + n * stride_gn, head, H, stride_gh, F, ROTATED, INTERLEAVED, BF)
            na, nb = ga * cos + gb * sin, gb * cos - ga * sin
            a, b = _load_pairs(x_ptr + n * stride_xn, head, H, stride_xh, F, ROTATED, INTERLEAVED, BF)
            squares = tl.sum(a * a + b * b, axis=1)
            if ALL_HEADS:
                scale = tl.rsqrt(tl.sum(squares, axis=0) / (2 * F * H) + eps)
            else:
                scale = tl.rsqrt(squares / (2 * F) + eps)[:, None]
            a *= scale
            b *= scale
            sum_a += na * a
            sum_b += nb * b
            na *= wa
            nb *= wb
            products = tl.sum(na * a + nb * b, axis=1)
            if ALL_HEADS:
                along = tl.sum(products, axis=0) / (2 * F * H)
            else:
                along = (products / (2 * F))[:, None]
            row_ptr = out_ptr + (n * H + head) * (2 * F)
            if INTERLEAVED:
                ga, gb = (na - a * along) * scale, (nb - b * along) * scale
                _store_interleaved(row_ptr, head < H, ga, gb, F, BF)
            else:
                at, gap = _halves(f, F, ROTATED)
                inside = (head < H) & (f < F)
                tl.store(row_ptr + at, (na - a * along) * scale, mask=inside)
                tl.store(row_ptr + at + gap, (nb - b * along) * scale, mask=inside)
    _store_sums(part_ptr, sum_a, sum_b, H, F, ALL_HEADS, ROTATED, INTERLEAVED, BH, BF)


@triton.jit
def _store_sums(  # type: ignore[no-untyped-def]
    part_ptr, sum_a, sum_b, H, F,
    ALL_HEADS: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr, BH: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    """Stores a program's partial sum of the weight's gradient: per head, or over all heads."""
    f = tl.arange(0, BF)
    at, gap = _halves(f, F, ROTATED)
    if ALL_HEADS:
        head = tl.arange(0, BH)[:, None]
        row_ptr = part_ptr + head * (2 * F)
        if INTERLEAVED:
            _store_interleaved(row_ptr, head < H, sum_a, sum_b, F, BF)
        else:
            inside = (head < H) & (f < F)[None, :]
            tl.store(row_ptr + at[None, :], sum_a, mask=inside)
            tl.store(row_ptr + (at + gap)[None, :], sum_b, mask=inside)
    elif INTERLEAVED:
        _store_interleaved(
            part_ptr, True, tl.sum(sum_a, axis=0)[None, :], tl.sum(sum_b, axis=0)[None, :], F, BF
        )
    else:
        tl.store(part_ptr + at, tl.sum(sum_a, axis=0), mask=f < F)
        tl.store(part_ptr + at + gap, tl.sum(sum_b, axis=0), mask=f < F)


@triton.jit
def _normed_backward_kernel(  # type: ignore[no-untyped-def]
    gq_ptr, gk_ptr, q_ptr, k_ptr, cos_ptr, sin_ptr, qw_ptr, kw_ptr, q_out_ptr, k_out_ptr, parts_ptr,
    stride_gqn, stride_gqh, stride_gkn, stride_gkh, stride_qn, stride_qh, stride_kn, stride_kh, eps,
    N, H, K, F, OFFSET: tl.constexpr, ALL_HEADS: tl.constexpr, ROTATED: tl.constexpr, INTERLEAVED: tl.constexpr,
    BH: tl.constexpr, BK: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    program, P = tl.program_id(0), tl.num_programs(0)
    if ALL_HEADS:
        q_part_ptr = parts_ptr + program * H * (2 * F)
        k_part_ptr = parts_ptr + (P * H + program * K) * (2 * F)
    else:
        q_part_ptr = parts_ptr + (tl.program_id(1) * P + program) * (2 * F)
        k_part_ptr = q_part_ptr
    if tl.program_id(1) == 0:
        _rotate_backward(
            gq_ptr, q_ptr, cos_ptr, sin_ptr, qw_ptr, q_out_ptr, q_part_ptr,
            stride_gqn, stride_gqh, stride_qn, stride_qh, eps, program, P, N, H, F,
            OFFSET, ALL_HEADS, ROTATED, INTERLEAVED, BH, BF,
        )  # fmt: skip
    else:
        _rotate_backward(
            gk_ptr, k_ptr, cos_ptr, sin_ptr, kw_ptr, k_out_ptr, k_part_ptr,
            stride_gkn, stride_gkh, stride_kn, stride_kh, eps, program, P, N, K, F,
            OFFSET, ALL_HEADS, ROTATED, INTERLEAVED, BK, BF,
        )  # fmt: skip


def _tokens(x_BTHD: torch.Tensor) -> torch.Tensor:
    """Views x as [N, H, D] with last stride 1; copies only where no such view exists."""
    B, T, H, D = x_BTHD.shape
    x_NHD = x_BTHD.reshape(B * T, H, D)
    return x_NHD if x_NHD.stride(2) == 1 else x_NHD.contiguous()


def _num_rotated(cos: torch.Tensor, D: int) -> int:
    """Number of rotated frequencies where rotation is partial; 0 where the whole head is rotated."""
    return 0 if 2 * cos.shape[-1] == D else cos.shape[-1]


def _launch(  # type: ignore[no-untyped-def]
    q, k, cos, sin, q_weight, k_weight, eps: float, back: bool, offset: float, all_heads: bool, interleaved: bool
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    check_device(_rope_kernel, q)
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    q_NHD, k_NKD = _tokens(q), _tokens(k)
    (N, H, D), K = q_NHD.shape, k_NKD.shape[1]
    if all_heads:
        check_width(H * D)
    of_q, of_k = (configuration(heads, D, capability_of(q), all_heads=all_heads) for heads in (H, K))
    if N:
        _rope_kernel[(N,)](
            q_NHD, k_NKD, cos.contiguous(), sin.contiguous(), q_weight, k_weight, q_out, k_out,
            *q_NHD.stride()[:2], *k_NKD.stride()[:2], eps, H, K, D // 2, BACK=back, NORM=q_weight is not None,
            OFFSET=offset, ALL_HEADS=all_heads, ROTATED=_num_rotated(cos, D), INTERLEAVED=interleaved,
            BH=of_q.heads, BK=of_k.heads, BF=of_q.frequencies, num_warps=of_q.warps,
        )  # fmt: skip
    return q_out, k_out


def _rope(q, k, cos, sin, back: bool, interleaved: bool = False) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[no-untyped-def]
    return _launch(q, k, cos, sin, None, None, 0.0, back, 0.0, False, interleaved)


def _normed_rope(  # type: ignore[no-untyped-def]
    q, k, cos, sin, q_weight, k_weight, eps: float,
    offset: float = 0.0, all_heads: bool = False, interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    weights = q_weight.contiguous(), k_weight.contiguous()
    return _launch(q, k, cos, sin, *weights, eps, False, offset, all_heads, interleaved)


def _normed_backward(  # type: ignore[no-untyped-def]
    gq, gk, q, k, cos, sin, q_weight, k_weight, eps: float,
    offset: float = 0.0, all_heads: bool = False, interleaved: bool = False,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    check_device(_normed_backward_kernel, q)
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    q_NHD, k_NKD, gq_NHD, gk_NKD = (_tokens(x) for x in (q, k, gq, gk))
    (N, H, D), K = q_NHD.shape, k_NKD.shape[1]
    of_q, of_k = (configuration(heads, D, capability_of(q), all_heads=all_heads) for heads in (H, K))
    P = min(of_q.programs, N)
    q_width, k_width = q_weight.numel(), k_weight.numel()
    parts = torch.empty(P * (q_width + k_width), dtype=torch.float32, device=q.device)
    if N:
        _normed_backward_kernel[(P, 2)](
            gq_NHD, gk_NKD, q_NHD, k_NKD, cos.contiguous(), sin.contiguous(),
            q_weight.contiguous(), k_weight.contiguous(), q_out, k_out, parts,
            *gq_NHD.stride()[:2], *gk_NKD.stride()[:2], *q_NHD.stride()[:2], *k_NKD.stride()[:2], eps,
            N, H, K, D // 2, OFFSET=offset, ALL_HEADS=all_heads, ROTATED=_num_rotated(cos, D), INTERLEAVED=interleaved,
            BH=of_q.heads, BK=of_k.heads, BF=of_q.frequencies, num_warps=of_q.warps,
        )  # fmt: skip
    if all_heads:
        gqw, gkw = parts[: P * q_width].view(P, q_width).sum(0), parts[P * q_width :].view(P, k_width).sum(0)
    else:
        gqw, gkw = parts.view(2, P, D).sum(1)
    # two outputs of an operator may not share memory, as they would after a cast to the same dtype
    return q_out, k_out, gqw.to(q_weight.dtype, copy=True), gkw.to(k_weight.dtype, copy=True)


torch.library.define("trimtab::rope", SCHEMA)
torch.library.define("trimtab::normed_rope", NORMED_SCHEMA)
torch.library.define("trimtab::normed_rope_backward", NORMED_BACKWARD_SCHEMA)
torch.library.impl("trimtab::rope", ("cpu", "cuda"), _rope)
torch.library.impl("trimtab::normed_rope", ("cpu", "cuda"), _normed_rope)
torch.library.impl("trimtab::normed_rope_backward", ("cpu", "cuda"), _normed_backward)


def _empty_like_each(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in tensors)


@torch.library.register_fake("trimtab::rope")
def _(q, k, cos, sin, back, interleaved=False):  # type: ignore[no-untyped-def]
    return _empty_like_each(q, k)


@torch.library.register_fake("trimtab::normed_rope")
def _(q, k, cos, sin, q_weight, k_weight, eps, offset=0.0, all_heads=False, interleaved=False):  # type: ignore[no-untyped-def]
    return _empty_like_each(q, k)


@torch.library.register_fake("trimtab::normed_rope_backward")
def _(gq, gk, q, k, cos, sin, q_weight, k_weight, eps, offset=0.0, all_heads=False, interleaved=False):  # type: ignore[no-untyped-def]
    return _empty_like_each(q, k, q_weight, k_weight)


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    _, _, cos, sin, ctx.back, ctx.interleaved = inputs
    ctx.save_for_backward(cos, sin)


def _differentiate(ctx, gq, gk):  # type: ignore[no-untyped-def]
    rotated = torch.ops.trimtab.rope(gq, gk, *ctx.saved_tensors, not ctx.back, ctx.interleaved)
    return *rotated, None, None, None, None


def _setup_normed_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs[:6])
    ctx.options = inputs[6:]


def _differentiate_normed(ctx, gq, gk):  # type: ignore[no-untyped-def]
    gq, gk, gqw, gkw = torch.ops.trimtab.normed_rope_backward(gq, gk, *ctx.saved_tensors, *ctx.options)
    return gq, gk, None, None, gqw, gkw, None, None, None, None


torch.library.register_autograd("trimtab::rope", _differentiate, setup_context=_setup_context)
torch.library.register_autograd(
    "trimtab::normed_rope", _differentiate_normed, setup_context=_setup_normed_context
)
torch.library.register_autograd("trimtab::normed_rope_backward", once_differentiable)


def rope(
    q_BTHD: torch.Tensor,
    k_BTKD: torch.Tensor,
    cos_BTF: torch.Tensor,
    sin_BTF: torch.Tensor,
    q_weight_D: torch.Tensor | None,
    k_weight_D: torch.Tensor | None,
    eps: float,
    offset: float,
    all_heads: bool,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `trimtab.kernels.rope.rope`."""
    assert not cos_BTF.requires_grad, "no gradient flows to positions"
    assert not sin_BTF.requires_grad, "no gradient flows to positions"
    if q_weight_D is None:
        q, k = torch.ops.trimtab.rope(q_BTHD, k_BTKD, cos_BTF, sin_BTF, False, interleaved)
    else:
        q, k = torch.ops.trimtab.normed_rope(
            q_BTHD, k_BTKD, cos_BTF, sin_BTF, q_weight_D, k_weight_D, eps, offset, all_heads, interleaved
        )
    return q, k
