"""The two backward kernels of attention in Triton: gradients of queries, gradients of keys and values.

Each accumulates its outputs in its own registers, in a fixed order, so the backward is deterministic. In return
scores and dp are computed in both: seven products where one kernel with atomic additions needs five. The first also
writes D = rowsum(o ∘ do), which the second reads. Where the log-sum-exp L has a gradient dL, D − dL replaces D: dL
adds p · dL to ds = p · (dp − D).

As in the forward kernel, a tile of packed rows whose gradients are not finite is recomputed, one key or row at a time,
so that NaN and infinities stay in their document.
"""

# T queries, S keys, K key/value heads, G query heads per K, D head size, R = T·G rows; BR rows and BN keys per tile

from __future__ import annotations

import triton
import triton.language as tl

from trimtab.kernels.attention.kernels_forward import (
    ROWS_PER_PASS,
    has_non_finite,
    interval,
    key_tile,
    one_row,
    row_tile,
    store_rows,
    tanh,
)


@triton.jit
def weights(s, lse, inner, outer, SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """p = exp(score − lse) from the raw products q · k, and the soft cap's factor on their gradient (1 without one)."""
    if SOFTCAP:
        tanh_s = tanh(s * inner)
        return tl.exp2(tanh_s * outer - lse), 1.0 - tanh_s * tanh_s
    else:
        return tl.exp2(s * inner - lse), 1.0


@triton.jit
def load_lse(ptr):  # type: ignore[no-untyped-def]
    """The log-sum-exp in units of log 2; +∞ for a fully masked row, so that its weights are zeros."""
    lse = tl.load(ptr)
    return tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)


@triton.jit
def subtract_dlse(delta, ptr, lse):  # type: ignore[no-untyped-def]
    """D − dL. For a fully masked row (`lse` as `load_lse` returns it) L is a constant, and dL is ignored."""
    return delta - tl.where(lse == float("inf"), 0.0, tl.load(ptr))


@triton.jit
def query_gradient(  # type: ignore[no-untyped-def]
    dq, q, do, lse, delta, k_ptr, v_ptr, b, g, n, first, end, S, stride_k, stride_v, inner, outer,
    MASKED: tl.constexpr, SOFTCAP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Returns dq + ds · k for one block of keys."""
    k = key_tile(k_ptr, b, g, n, stride_k, S, D, DP, BN, MASKED, TMA)
    v = key_tile(v_ptr, b, g, n, stride_v, S, D, DP, BN, MASKED, TMA)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    p, cap_slope = weights(s, lse[:, None], inner, outer, SOFTCAP)
    if MASKED:
        j = n + tl.arange(0, BN)
        p = tl.where((j[None, :] >= first[:, None]) & (j[None, :] < end[:, None]), p, 0.0)
    ds = p * (dp - delta[:, None]) * cap_slope
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit
def query_gradient_by_key(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, lse_ptr, dlse_ptr, dq_ptr, first_ptr, query_last_ptr, r0, low, high,
    stride_qt, stride_qh, stride_k, stride_v, stride_dt, stride_dh, T, S, H, window, inner, outer, scale, offset,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    CAUSAL: tl.constexpr, TWO_SIDED: tl.constexpr, PACKED: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Recomputes dq of ROWS_PER_PASS rows, keys low … high one at a time: dq = Σ ds · k over a row's visible keys."""
    R = T * G
    r = r0 + tl.arange(0, ROWS_PER_PASS)
    inside = tl.minimum(r, R - 1)
    q = row_tile(q_ptr, inside, stride_qt, stride_qh, G, D, DP).to(tl.float32)
    do = row_tile(do_ptr, inside, stride_dt, stride_dh, G, D, DP).to(tl.float32)
    delta = tl.sum(row_tile(o_ptr, inside, H * D, D, G, D, DP).to(tl.float32) * do, 1)
    lse = load_lse(lse_ptr + (inside // G).to(tl.int64) * H + inside % G)
    if dlse_ptr is not None:
        delta = subtract_dlse(delta, dlse_ptr + (inside // G).to(tl.int64) * H + inside % G, lse)
    first, end = interval(
        inside // G, first_ptr, query_last_ptr, T, S, window, offset, CAUSAL, TWO_SIDED, PACKED
    )
    dq = tl.zeros((ROWS_PER_PASS, DP), tl.float32)
    for j in tl.range(low, high, num_stages=1):
        row = tl.cast(j, tl.int64)
        k = one_row(k_ptr + row * stride_k, D, DP)[None, :]
        dp = tl.sum(do * one_row(v_ptr + row * stride_v, D, DP)[None, :], 1)
        p, cap_slope = weights(tl.sum(q * k, 1), lse, inner, outer, SOFTCAP)
        ds = p * (dp - delta) * cap_slope
        dq += tl.where(((j >= first) & (j < end))[:, None], ds[:, None] * k, 0.0)
    tl.debug_barrier()
    store_rows(dq_ptr, dq * scale, r, R, H * D, G, D, DP)


@triton.jit(do_not_specialize=["T", "S", "window", "offset"])
def attention_query_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, k_rows_ptr, v_rows_ptr, o_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, first_ptr,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_db, stride_dt, stride_dh,
    T, S, K, window, inner, outer, scale, dlse_ptr, query_last_ptr, offset,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, TWO_SIDED: tl.constexpr, PACKED: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Computes dq and D for a tile of rows; loops over the keys as the forward does."""
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
    if query_last_ptr is not None:
        query_last_ptr += b64 * T
    base = b64 * T * H + g * G

    r = tile * BR + tl.arange(0, BR)
    inside = tl.minimum(r, R - 1)
    vector = base + (inside // G).to(tl.int64) * H + inside % G
    q = row_tile(q_ptr, inside, stride_qt, stride_qh, G, D, DP)
    do = row_tile(do_ptr, inside, stride_dt, stride_dh, G, D, DP)
    o = row_tile(o_ptr + base * D, inside, H * D, D, G, D, DP)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if dlse_ptr is not None:
        delta = subtract_dlse(delta, dlse_ptr + vector, load_lse(lse_ptr + vector))
    tl.store(delta_ptr + vector, delta, mask=r < R)
    lse = load_lse(lse_ptr + vector)

    first, end = interval(
        inside // G, first_ptr, query_last_ptr, T, S, window, offset, CAUSAL, TWO_SIDED, PACKED
    )
    low, all_end = interval(
        tile * BR // G, first_ptr, query_last_ptr, T, S, window, offset, CAUSAL, TWO_SIDED, PACKED
    )
    last = tl.minimum(tile * BR + BR - 1, R - 1) // G
    all_first, high = interval(
        last, first_ptr, query_last_ptr, T, S, window, offset, CAUSAL, TWO_SIDED, PACKED
    )
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

    if PACKED:  # noqa: SIM102  (decided at compile time, the next one not)
        if has_non_finite(dq) != 0:
            for r0 in tl.range(tile * BR, tl.minimum(tile * BR + BR, R), ROWS_PER_PASS, num_stages=1):
                dlse = None if dlse_ptr is None else dlse_ptr + base
                query_gradient_by_key(
                    q_ptr, k_rows_ptr + b64 * stride_kb + g64 * stride_kh,
                    v_rows_ptr + b64 * stride_vb + g64 * stride_vh,
                    o_ptr + base * D, do_ptr, lse_ptr + base, dlse, dq_ptr + base * D, first_ptr, query_last_ptr,
                    r0, low, high,
                    stride_qt, stride_qh, stride_kt, stride_vt, stride_dt, stride_dh, T, S, H, window,
                    inner, outer, scale, offset, G, D, DP, CAUSAL, TWO_SIDED, PACKED, SOFTCAP,
                )  # fmt: skip


@triton.jit
def key_gradients(  # type: ignore[no-untyped-def]
    dk, dv, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, b, g, r0, i_first, i_last, R, H, shift,
    stride_qt, stride_qh, stride_dt, stride_dh, inner, outer,
    MASKED: tl.constexpr, SOFTCAP: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    BR: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Returns dk + dsᵀ · q and dv + pᵀ · do for one block of rows; scores are transposed, [keys, rows]."""
    t0 = r0 // G
    r = r0 + tl.arange(0, BR)
    if MASKED:
        near = tl.minimum(r, R - 1) - t0 * G
    else:
        # if every tile starts at the first head of a group, these offsets are the same for all blocks
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
    p, cap_slope = weights(s, lse[None, :], inner, outer, SOFTCAP)
    if MASKED:
        i = r // G + shift
        p = tl.where((i[None, :] >= i_first[:, None]) & (i[None, :] <= i_last[:, None]), p, 0.0)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
    dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
    ds = p * (dp - tl.load(delta_ptr + vector)[None, :]) * cap_slope
    return tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION), dv


@triton.jit
def key_gradients_by_row(  # type: ignore[no-untyped-def]
    program, q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, last_ptr, key_first_ptr,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_db, stride_dt, stride_dh,
    T, S, K, window, inner, outer, scale, offset,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, TWO_SIDED: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Recomputes dk and dv of a program's tile of packed rows, ROWS_PER_PASS keys at a time, one row after the other.

    Without an offset there are as many queries as keys: `launch_triton.backward` passes one in every other case.
    """
    H = K * G
    num_tiles = tl.cdiv(S, BN)
    low = program % num_tiles * BN
    b, g = (program // num_tiles // K).to(tl.int64), (program // num_tiles % K).to(tl.int64)
    q_ptr += b * stride_qb + g * G * stride_qh
    do_ptr += b * stride_db + g * G * stride_dh
    last_ptr += b * S
    stop = tl.minimum(low + BN, S)
    if offset is None:
        shift, num_queries = 0, S
    else:
        shift, num_queries = offset, T
    i_end = num_queries + shift
    i_stop = tl.minimum(tl.minimum(stop - 1 + window, i_end), tl.load(last_ptr + stop - 1) + 1)
    i_start = low
    if TWO_SIDED:
        key_first_ptr += b * S
        i_start = tl.maximum(low - window + 1, tl.load(key_first_ptr + low))
    if TWO_SIDED or offset is not None:
        i_start = tl.maximum(i_start, shift)
    for n0 in tl.range(low, stop, ROWS_PER_PASS, num_stages=1):
        n = n0 + tl.arange(0, ROWS_PER_PASS)
        j = tl.minimum(n, S - 1)
        k = row_tile(k_ptr + b * stride_kb + g * stride_kh, j, stride_kt, 0, 1, D, DP).to(tl.float32)
        v = row_tile(v_ptr + b * stride_vb + g * stride_vh, j, stride_vt, 0, 1, D, DP).to(tl.float32)
        i_first = j
        if TWO_SIDED:
            i_first = tl.maximum(j - window + 1, tl.load(key_first_ptr + j))
        i_last = tl.minimum(tl.minimum(j + window - 1, i_end - 1), tl.load(last_ptr + j))
        dk = tl.zeros((ROWS_PER_PASS, DP), tl.float32)
        dv = tl.zeros((ROWS_PER_PASS, DP), tl.float32)
        for r in tl.range((i_start - shift) * G, (i_stop - shift) * G, num_stages=1):
            i, h = r // G + shift, r % G
            t = tl.cast(r // G, tl.int64)
            vector = (b * num_queries + t) * H + g * G + h
            q = one_row(q_ptr + t * stride_qt + h * stride_qh, D, DP)[None, :]
            do = one_row(do_ptr + t * stride_dt + h * stride_dh, D, DP)[None, :]
            p, cap_slope = weights(tl.sum(k * q, 1), load_lse(lse_ptr + vector), inner, outer, SOFTCAP)
            ds = p * (tl.sum(v * do, 1) - tl.load(delta_ptr + vector)) * cap_slope
            seen = ((i >= i_first) & (i <= i_last))[:, None]
            dv += tl.where(seen, p[:, None] * do, 0.0)
            dk += tl.where(seen, ds[:, None] * q, 0.0)
        tl.debug_barrier()  # orders after the tile's own stores, whichever threads wrote them
        store_rows(dk_ptr + (b * S * K + g) * D, dk * scale, n, stop, K * D, 1, D, DP)
        store_rows(dv_ptr + (b * S * K + g) * D, dv, n, stop, K * D, 1, D, DP)


@triton.jit(do_not_specialize=["T", "S", "window", "offset"])
def attention_key_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, do_ptr, q_rows_ptr, do_rows_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, last_ptr,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    stride_db, stride_dt, stride_dh,
    T, S, K, window, inner, outer, scale, key_first_ptr, offset,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, TWO_SIDED: tl.constexpr, PACKED: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Computes dk and dv for a tile of keys, accumulated over the rows of all heads of the group."""
    R = T * G
    H = K * G
    num_tiles = tl.cdiv(S, BN)
    n = tl.program_id(0) % num_tiles * BN  # the first keys have most queries and start first
    b, g = tl.program_id(0) // num_tiles // K, tl.program_id(0) // num_tiles % K
    b64, g64 = b.to(tl.int64), g.to(tl.int64)
    if not TMA:
        q_ptr += b64 * stride_qb + g64 * G * stride_qh
        do_ptr += b64 * stride_db + g64 * G * stride_dh
    whole_lse_ptr, whole_delta_ptr, whole_last_ptr, whole_first_ptr = (
        lse_ptr,
        delta_ptr,
        last_ptr,
        key_first_ptr,
    )
    lse_ptr += b64 * T * H + g * G
    delta_ptr += b64 * T * H + g * G
    k = key_tile(k_ptr + b64 * stride_kb + g64 * stride_kh, b, g, n, stride_kt, S, D, DP, BN, True, False)
    v = key_tile(v_ptr + b64 * stride_vb + g64 * stride_vh, b, g, n, stride_vt, S, D, DP, BN, True, False)

    # The queries that attend to key j are at positions i_first … i_last; `low` … `high` are those of the tile.
    if offset is None:
        shift, i_end = S - T, S - 1
    else:
        shift, i_end = offset, offset + T - 1
    j = tl.minimum(n + tl.arange(0, BN), S - 1)
    n_last = tl.minimum(n + BN - 1, S - 1)
    if CAUSAL or TWO_SIDED:
        i_first, low, all_first = j, n, n_last
        if TWO_SIDED:
            i_first, low, all_first = j - window + 1, n - window + 1, n_last - window + 1
            if PACKED:
                key_first_ptr += b64 * S
                i_first = tl.maximum(i_first, tl.load(key_first_ptr + j))
                low = tl.maximum(low, tl.load(key_first_ptr + n))
                all_first = tl.maximum(all_first, tl.load(key_first_ptr + n_last))
        i_last = tl.minimum(j + window - 1, i_end)
        all_last, high = tl.minimum(n + window - 1, i_end), tl.minimum(n_last + window - 1, i_end)
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

    if PACKED:
        bad = has_non_finite(tl.abs(dk) + tl.abs(dv))
        if bad != 0:
            # Derived from the program id so that the compiler cannot know its value: else it would keep the values
            # computed so far in registers all through the loops.
            key_gradients_by_row(
                tl.program_id(0) + bad - 1, q_rows_ptr, k_ptr, v_ptr, do_rows_ptr, whole_lse_ptr, whole_delta_ptr,
                dk_ptr, dv_ptr, whole_last_ptr, whole_first_ptr,
                stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
                stride_db, stride_dt, stride_dh,
                T, S, K, window, inner, outer, scale, offset, G, D, DP, BN, TWO_SIDED, SOFTCAP,
            )  # fmt: skip
