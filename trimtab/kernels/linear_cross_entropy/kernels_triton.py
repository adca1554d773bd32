"""Triton kernels over rows of logits: row statistics, loss, and gradient in place.

The products are cuBLAS's: no Triton product came near its throughput, so the kernels here read logits from
memory in the inputs' dtype, once or twice, and overwrite them with ∂loss/∂logits.
"""

# L lanes, E entries of a lane (16 bytes of a thread); a block is L · E entries of a row

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _block(at, L: tl.constexpr, E: tl.constexpr):  # type: ignore[no-untyped-def]
    return at + tl.arange(0, L)[:, None] * E + tl.arange(0, E)[None, :]


@triton.jit
def _tanh(x):  # type: ignore[no-untyped-def]
    """tanh without libdevice, which the interpreter lacks. Near 0 a series: 1 − 2/(e²ˣ + 1) cancels there."""
    s = x * x
    near = x * (1.0 + s * (-0.333333333 + s * (0.133333333 + s * (-0.0539682540 + s * 0.0218694885))))
    far = 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
    return tl.where(s < 0.0625, near, far)


@triton.jit
def _expm1(x):  # type: ignore[no-untyped-def]
    """eˣ − 1 for x ≤ 0, accurate for small x."""
    series = x * (
        1 + x / 2 * (1 + x / 3 * (1 + x / 4 * (1 + x / 5 * (1 + x / 6 * (1 + x / 7 * (1 + x / 8))))))
    )
    return tl.where(x > -0.5, series, tl.exp(x) - 1.0)


@triton.jit
def _update_statistics(z_LE, m_L, s_L, t_L, SUMMED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Updates running maximum and sums per lane: one exponential per E entries to rescale, no synchronization."""
    new_L = tl.maximum(m_L, tl.max(z_LE, axis=1))
    s_L = s_L * tl.exp(m_L - new_L) + tl.sum(tl.exp(z_LE - new_L[:, None]), axis=1)
    if SUMMED:
        t_L += tl.sum(z_LE, axis=1)
    return new_L, s_L, t_L


@triton.jit
def _row_statistics(  # type: ignore[no-untyped-def]
    row_ptr,
    start,
    stop,
    softcap,
    CAPPED: tl.constexpr,
    SUMMED: tl.constexpr,
    L: tl.constexpr,
    E: tl.constexpr,
):
    """Returns (largest, Σ exp(z − largest), Σ z) over the entries [start, stop) of a row."""
    m_L = tl.full((L,), -3.0e38, tl.float32)
    s_L = tl.zeros((L,), tl.float32)
    t_L = tl.zeros((L,), tl.float32)
    tail_L = tl.zeros((L,), tl.float32)
    # whole blocks are read unmasked: with a mask an odd vocabulary would be read entry by entry
    whole = start + (stop - start) // (L * E) * (L * E)
    for at in range(start, whole, L * E):
        z_LE = tl.load(row_ptr + _block(at, L, E)).to(tl.float32)
        if CAPPED:
            z_LE = softcap * _tanh(z_LE / softcap)
        m_L, s_L, t_L = _update_statistics(z_LE, m_L, s_L, t_L, SUMMED)
    if whole < stop:
        column_LE = _block(whole, L, E)
        z_LE = tl.load(row_ptr + column_LE, mask=column_LE < stop, other=0.0).to(tl.float32)
        if CAPPED:
            z_LE = softcap * _tanh(z_LE / softcap)
        if SUMMED:  # not accumulated into t_L: Triton 3.6 does not compile a loop's sum that is used twice
            tail_L = tl.sum(z_LE, axis=1)
        z_LE = tl.where(column_LE < stop, z_LE, -float("inf"))
        m_L, s_L, tail_L = _update_statistics(z_LE, m_L, s_L, tail_L, False)
    m = tl.max(m_L, axis=0)
    return m, tl.sum(s_L * tl.exp(m_L - m), axis=0), tl.sum(t_L, axis=0) + tl.sum(tail_L, axis=0)


@triton.jit
def _gradient(  # type: ignore[no-untyped-def]
    raw_LE, column_LE, label, at_label, lse, slope, flat, scale, softcap, CAPPED: tl.constexpr
):
    """Returns scale · ∂loss/∂raw: p · slope − flat, and `at_label` at the label."""
    z_LE = raw_LE
    if CAPPED:
        t_LE = _tanh(raw_LE / softcap)
        z_LE = softcap * t_LE
    d_LE = tl.exp(z_LE - lse) * slope - flat
    d_LE = tl.where(column_LE == label, at_label, d_LE)
    if CAPPED:
        d_LE *= 1.0 - t_LE * t_LE
    # not just scale · d: an ignored row is 0 whatever its logits are
    return tl.where(scale != 0.0, d_LE * scale, 0.0)


@triton.jit
def _write_gradient(  # type: ignore[no-untyped-def]
    row_ptr,
    start,
    stop,
    label,
    lse,
    nll,
    scale,
    softcap,
    smoothing,
    z_loss,
    vocabulary,
    CAPPED: tl.constexpr,
    L: tl.constexpr,
    E: tl.constexpr,
):
    """Overwrites the logits [start, stop) of a row with their gradient."""
    slope = 1.0 + 2.0 * z_loss * lse
    flat = smoothing / vocabulary
    # p − 1 as expm1(−nll): accurate where p is nearly 1
    at_label = _expm1(-nll) + 2.0 * z_loss * lse * tl.exp(-nll) + smoothing - flat
    kind = row_ptr.dtype.element_ty
    whole = start + (stop - start) // (L * E) * (L * E)
    for at in range(start, whole, L * E):
        column_LE = _block(at, L, E)
        raw_LE = tl.load(row_ptr + column_LE).to(tl.float32)
        d_LE = _gradient(raw_LE, column_LE, label, at_label, lse, slope, flat, scale, softcap, CAPPED)
        tl.store(row_ptr + column_LE, d_LE.to(kind))
    if whole < stop:
        column_LE = _block(whole, L, E)
        inside_LE = column_LE < stop
        raw_LE = tl.load(row_ptr + column_LE, mask=inside_LE, other=0.0).to(tl.float32)
        d_LE = _gradient(raw_LE, column_LE, label, at_label, lse, slope, flat, scale, softcap, CAPPED)
        tl.store(row_ptr + column_LE, d_LE.to(kind), mask=inside_LE)


@triton.jit
def _label_logit(row_ptr, label, inside, softcap, CAPPED: tl.constexpr):  # type: ignore[no-untyped-def]
    z = tl.load(row_ptr + tl.where(inside, label, 0), mask=inside, other=0.0).to(tl.float32)
    if CAPPED:
        z = softcap * _tanh(z / softcap)
    return z


@triton.jit
def loss_and_gradient_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    labels_ptr,
    scale_ptr,
    losses_ptr,
    stride,
    columns,
    softcap,
    smoothing,
    z_loss,
    gradient_scale,
    CAPPED: tl.constexpr,
    SMOOTHED: tl.constexpr,
    L: tl.constexpr,
    E: tl.constexpr,
):
    """One program per row: its loss, then its gradient, which overwrites the logits. The second read may hit the cache.

    losses = scale · loss; gradient = scale · gradient_scale · ∂loss/∂logits. A scale of 0 is an ignored token.
    """
    row = tl.program_id(0).to(tl.int64)  # row · stride exceeds 2³¹
    row_ptr = logits_ptr + row * stride
    label = tl.load(labels_ptr + row).to(
        tl.int32
    )  # every entry is compared with it: 64 bits take twice as long
    scale = tl.load(scale_ptr + row)
    live = scale != 0.0
    z_label = _label_logit(row_ptr, label, live, softcap, CAPPED)
    stop = tl.where(live, columns, 0)
    m, s, t = _row_statistics(row_ptr, 0, stop, softcap, CAPPED, SMOOTHED, L, E)
    log = tl.log(tl.where(live, s, 1.0))
    m = tl.where(live, m, 0.0)
    lse = m + log
    nll = log - (z_label - m)
    loss = nll + z_loss * lse * lse
    if SMOOTHED:
        loss += smoothing * (z_label - t / columns)
    tl.store(losses_ptr + row, tl.where(live, loss * scale, 0.0))
    _write_gradient(
        row_ptr,
        0,
        columns,
        label,
        lse,
        nll,
        scale * gradient_scale,
        softcap,
        smoothing,
        z_loss,
        columns,
        CAPPED,
        L,
        E,
    )


@triton.jit(do_not_specialize=["part_blocks", "first", "parts", "plane"])
def row_statistics_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    labels_ptr,
    partials_ptr,
    stride,
    columns,
    part_blocks,
    first,
    parts,
    plane,
    softcap,
    CAPPED: tl.constexpr,
    L: tl.constexpr,
    E: tl.constexpr,
):
    """One program per row and part: partials[4, row, part]. Column 0 is entry `first` of the vocabulary."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    row_ptr = logits_ptr + row * stride
    start = part * part_blocks * (L * E)
    stop = tl.minimum(start + part_blocks * (L * E), columns)
    label = (tl.load(labels_ptr + row) - first).to(tl.int32)
    inside = (label >= start) & (label < stop)
    z_label = _label_logit(row_ptr, label, inside, softcap, CAPPED)
    m, s, t = _row_statistics(row_ptr, start, stop, softcap, CAPPED, True, L, E)
    out_ptr = partials_ptr + row * parts + part
    tl.store(out_ptr, m)
    tl.store(out_ptr + plane, s)
    tl.store(out_ptr + 2 * plane, z_label)
    tl.store(out_ptr + 3 * plane, t)


@triton.jit(do_not_specialize=["first", "vocabulary"])
def gradient_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    labels_ptr,
    scale_ptr,
    lse_ptr,
    nll_ptr,
    stride,
    columns,
    first,
    vocabulary,
    softcap,
    smoothing,
    z_loss,
    CAPPED: tl.constexpr,
    BLOCKS: tl.constexpr,
    L: tl.constexpr,
    E: tl.constexpr,
):
    """One program per row and part: overwrites logits with scale · ∂loss/∂logits, for a known lse of the whole row."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * (BLOCKS * L * E)
    stop = tl.minimum(start + BLOCKS * L * E, columns)
    _write_gradient(
        logits_ptr + row * stride,
        start,
        stop,
        (tl.load(labels_ptr + row) - first).to(tl.int32),
        tl.load(lse_ptr + row),
        tl.load(nll_ptr + row),
        tl.load(scale_ptr + row),
        softcap,
        smoothing,
        z_loss,
        vocabulary,
        CAPPED,
        L,
        E,
    )


@triton.jit
def scale_kernel(x_ptr, factor_ptr, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """x ← x · factor; x is not read if the factor is 1, the usual case. A fixed number of programs loops over x."""
    factor = tl.load(factor_ptr).to(tl.float32)
    if factor != 1.0:
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        for start in range(tl.program_id(0).to(tl.int64) * BLOCK, count, step):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + at, mask=at < count, other=0.0)
            tl.store(x_ptr + at, (x.to(tl.float32) * factor).to(x_ptr.dtype.element_ty), mask=at < count)
