"""The two backward kernels of attention in Triton: gradients of queries, gradients of keys and values.

Each sums what it writes in its own registers, in a fixed order, so that the same inputs give the same bits.
The price is that scores and dp are computed in both: seven products where one kernel with atomic additions
needs five. The first also writes D = rowsum(o ∘ do), which the second reads.
"""

# T queries, S keys, K key/value heads, G query heads to each, D head size, R = T·G rows; BR rows and BN keys a tile

from __future__ import annotations

import triton
import triton.language as tl

from trimtab.kernels.attention.kernels_forward import interval, key_tile, row_tile, store_rows, tanh


@triton.jit
def weights(s, lse, inner, outer, SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """p = exp(score − lse) from raw products, and the factor that a soft cap puts on their gradient."""
    if SOFTCAP:
        bent = tanh(s * inner)
        return tl.exp2(bent * outer - lse), 1.0 - bent * bent
    else:
        return tl.exp2(s * inner - lse), 1.0


@triton.jit
def load_lse(ptr):  # type: ignore[no-untyped-def]
    """In units of log 2; +∞ for a row that sees nothing, so that its weights are zeros."""
    lse = tl.load(ptr)
    return tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)


@triton.jit
def query_gradient(  # type: ignore[no-untyped-def]
    dq, q, do, lse, delta, k_ptr, v_ptr, b, g, n, first, end, S, stride_k, stride_v, inner, outer,
    MASKED: tl.constexpr, SOFTCAP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """dq += ds · k for one block of keys."""
    k = key_tile(k_ptr, b, g, n, stride_k, S, D, DP, BN, MASKED, TMA)
    v = key_tile(v_ptr, b, g, n, stride_v, S, D, DP, BN, MASKED, TMA)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    p, bend = weights(s, lse[:, None], inner, outer, SOFTCAP)
    if MASKED:
        j = n + tl.arange(0, BN)
        p = tl.where((j[None, :] >= first[:, None]) & (j[None, :] < end[:, None]), p, 0.0)
    ds = p * (dp - delta[:, None]) * bend
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=["T", "S", "window"])
def query_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, first_ptr,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_db, stride_dt, stride_dh,
    T, S, K, window, inner, outer, scale,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, PACKED: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """dq and D for a tile of rows; walks the keys as the forward does."""
    R = T * G
    H = K * G
    num_tiles = tl.cdiv(R, BR)
    tile = num_tiles - 1 - tl.program_id(0) % num_tiles
    b, g = tl.program_id(0) // num_tiles // K, tl.program_id(0) // num_tiles % K
    b64, g64 = b.to(tl.int64), g.to(tl.int64)
    q_ptr += b64 * stride_qb + g64 * G * stride_qh
    do_ptr += b64 * stride_db + g64 * G * stride_dh
    if not TMA:
        k_ptr += b64 * stride_kb + g64 * stride_kh
        v_ptr += b64 * stride_vb + g64 * stride_vh
    first_ptr += b64 * T
    base = b64 * T * H + g * G

    r = tile * BR + tl.arange(0, BR)
    inside = tl.minimum(r, R - 1)
    vector = base + (inside // G).to(tl.int64) * H + inside % G
    q = row_tile(q_ptr, inside, stride_qt, stride_qh, G, D, DP)
    do = row_tile(do_ptr, inside, stride_dt, stride_dh, G, D, DP)
    o = row_tile(o_ptr + base * D, inside, H * D, D, G, D, DP)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta_ptr + vector, delta, mask=r < R)
    lse = load_lse(lse_ptr + vector)

    first, end = interval(inside // G, first_ptr, T, S, window, CAUSAL, PACKED)
    low, all_end = interval(tile * BR // G, first_ptr, T, S, window, CAUSAL, PACKED)
    last = tl.minimum(tile * BR + BR - 1, R - 1) // G
    all_first, high = interval(last, first_ptr, T, S, window, CAUSAL, PACKED)
    left = tl.cdiv(tl.maximum(all_first - low, 0), BN)
    whole = tl.maximum(all_end - low - left * BN, 0) // BN
    count = tl.cdiv(tl.maximum(high - low, 0), BN)

    dq = tl.zeros((BR, DP), tl.float32)
    for block in range(left, left + whole):
        dq = query_gradient(
            dq, q, do, lse, delta, k_ptr, v_ptr, b, g, low + block * BN, first, end, S, stride_kt, stride_vt,
            inner, outer, False, SOFTCAP, D, DP, BN, PRECISION, TMA,
        )  # fmt: skip
    for index in range(count - whole):
        block = tl.where(index < left, index, index + whole)
        dq = query_gradient(
            dq, q, do, lse, delta, k_ptr, v_ptr, b, g, low + block * BN, first, end, S, stride_kt, stride_vt,
            inner, outer, True, SOFTCAP, D, DP, BN, PRECISION, TMA,
        )  # fmt: skip
    store_rows(dq_ptr + base * D, dq * scale, r, R, H * D, G, D, DP)


@triton.jit
def key_gradients(  # type: ignore[no-untyped-def]
    dk, dv, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, b, g, r0, i_first, i_last, R, H, shift,
    stride_qt, stride_qh, stride_dt, stride_dh, inner, outer,
    MASKED: tl.constexpr, SOFTCAP: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BR: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """dv += pᵀ · do and dk += dsᵀ · q for one block of rows; scores are transposed, keys by rows."""
    t0 = r0 // G
    r = r0 + tl.arange(0, BR)
    if MASKED:
        near = tl.minimum(r, R - 1) - t0 * G
    else:
        # where tiles begin at a group's first head, these do not change from block to block
        near = tl.arange(0, BR) if BR % G == 0 else r - t0 * G
    t, h = near // G, near % G
    if TMA:
        q = q_ptr.load([b, t0, g * G, 0]).reshape(BR, DP)
        do = do_ptr.load([b, t0, g * G, 0]).reshape(BR, DP)
    else:
        d = tl.arange(0, DP)
        q_offset = (t * stride_qt + h * stride_qh)[:, None] + d[None, :]
        do_offset = (t * stride_dt + h * stride_dh)[:, None] + d[None, :]
        if D == DP:
            q = tl.load(q_ptr + t0.to(tl.int64) * stride_qt + q_offset)
            do = tl.load(do_ptr + t0.to(tl.int64) * stride_dt + do_offset)
        else:
            q = tl.load(q_ptr + t0.to(tl.int64) * stride_qt + q_offset, mask=d[None, :] < D, other=0.0)
            do = tl.load(do_ptr + t0.to(tl.int64) * stride_dt + do_offset, mask=d[None, :] < D, other=0.0)
    vector = t0.to(tl.int64) * H + (t * H + h)
    lse = load_lse(lse_ptr + vector)
    s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    p, bend = weights(s, lse[None, :], inner, outer, SOFTCAP)
    if MASKED:
        i = r // G + shift
        p = tl.where((i[None, :] >= i_first[:, None]) & (i[None, :] <= i_last[:, None]), p, 0.0)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
    dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
    ds = p * (dp - tl.load(delta_ptr + vector)[None, :]) * bend
    return tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION), dv


@triton.jit(do_not_specialize=["T", "S", "window"])
def key_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, last_ptr,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_db, stride_dt, stride_dh,
    T, S, K, window, inner, outer, scale,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, PACKED: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """dk and dv for a tile of keys, summed over the rows of all heads of the group."""
    R = T * G
    H = K * G
    num_tiles = tl.cdiv(S, BN)
    n = tl.program_id(0) % num_tiles * BN  # the first keys are seen most and start first
    b, g = tl.program_id(0) // num_tiles // K, tl.program_id(0) // num_tiles % K
    b64, g64 = b.to(tl.int64), g.to(tl.int64)
    if not TMA:
        q_ptr += b64 * stride_qb + g64 * G * stride_qh
        do_ptr += b64 * stride_db + g64 * G * stride_dh
    lse_ptr += b64 * T * H + g * G
    delta_ptr += b64 * T * H + g * G
    k = key_tile(k_ptr + b64 * stride_kb + g64 * stride_kh, b, g, n, stride_kt, S, D, DP, BN, True, False)
    v = key_tile(v_ptr + b64 * stride_vb + g64 * stride_vh, b, g, n, stride_vt, S, D, DP, BN, True, False)

    # The queries that see key j stand at positions i_first … i_last; `low` … `high` are those of the tile.
    shift = S - T
    j = tl.minimum(n + tl.arange(0, BN), S - 1)
    n_last = tl.minimum(n + BN - 1, S - 1)
    if CAUSAL:
        i_first, low, all_first = j, n, n_last
        i_last = tl.minimum(j + window - 1, S - 1)
        all_last, high = tl.minimum(n + window - 1, S - 1), tl.minimum(n_last + window - 1, S - 1)
        if PACKED:
            last_ptr += b64 * S
            i_last = tl.minimum(i_last, tl.load(last_ptr + j))
            all_last = tl.minimum(all_last, tl.load(last_ptr + n))
            high = tl.minimum(high, tl.load(last_ptr + n_last))
    else:
        i_first, low, all_first = j * 0 + shift, shift, shift
        i_last = j * 0 + (S - 1)
        all_last, high = S - 1, S - 1
    r_low = tl.maximum(low - shift, 0) * G
    left = tl.cdiv(tl.maximum(all_first - shift, 0) * G - r_low, BR)
    whole = tl.maximum((all_last - shift + 1) * G - r_low - left * BR, 0) // BR
    count = tl.cdiv(tl.maximum((high - shift + 1) * G - r_low, 0), BR)

    dk = tl.zeros((BN, DP), tl.float32)
    dv = tl.zeros((BN, DP), tl.float32)
    for block in range(left, left + whole):
        dk, dv = key_gradients(
            dk, dv, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, b, g, r_low + block * BR, i_first, i_last,
            R, H, shift, stride_qt, stride_qh, stride_dt, stride_dh, inner, outer,
            False, SOFTCAP, G, D, DP, BR, PRECISION, TMA,
        )  # fmt: skip
    for index in range(count - whole):
        block = tl.where(index < left, index, index + whole)
        dk, dv = key_gradients(
            dk, dv, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, b, g, r_low + block * BR, i_first, i_last,
            R, H, shift, stride_qt, stride_qh, stride_dt, stride_dh, inner, outer,
            True, SOFTCAP, G, D, DP, BR, PRECISION, TMA,
        )  # fmt: skip

    rows = n + tl.arange(0, BN)
    store_rows(dk_ptr + (b64 * S * K + g) * D, dk * scale, rows, S, K * D, 1, D, DP)
    store_rows(dv_ptr + (b64 * S * K + g) * D, dv, rows, S, K * D, 1, D, DP)
