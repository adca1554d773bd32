"""The forward kernel of attention in Triton, and the device functions that the backward kernels share.

The query heads of a group are rows of one matrix: with G = H/K heads per key/value head, row r is query
r // G of head r % G, so that a tile of 128 rows and G = 4 spans 32 tokens. Its keys are then read once for
the whole group, and few masked scores are computed around short documents. A query's visible keys are an interval,
[first, end), for any combination of causal mask, window and document. A tile therefore loops from its first row's
`first` to its last row's `end`; only blocks that are not visible to all of its rows are masked.

A NaN or an infinity affects only its own document. In a product a masked weight is 0, and 0 · NaN is NaN, so a
non-finite value would affect every row of a tile. The loops do not check for that: a tile of packed rows whose result
is not finite is recomputed, one key at a time and without products of tiles, selecting each row's visible keys. That
is slow, takes few registers, and costs a tile with finite results one comparison.
"""

# T queries, S keys, K key/value heads, G query heads per K, D head size, R = T·G rows; BR rows and BN keys per tile

from __future__ import annotations

import triton
import triton.language as tl

ROWS_PER_PASS = tl.constexpr(16)
"""Rows (or keys) per iteration when a tile with non-finite results is recomputed."""


@triton.jit
def interval(  # type: ignore[no-untyped-def]
    t, first_ptr, query_last_ptr, T, S, window, offset,
    CAUSAL: tl.constexpr, TWO_SIDED: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The visible keys [first, end) of queries `t`, scalars or vectors; empty where end <= first.

    Query t is at position t + offset; without an offset the queries are the last positions, and end cannot exceed S.
    """
    if CAUSAL:
        if offset is None:
            i = t + (S - T)
        else:
            i = t + offset
        first = tl.maximum(i - window + 1, 0)
        if PACKED:
            first = tl.maximum(first, tl.load(first_ptr + t))
        end = i + 1
        if offset is not None:
            end = tl.minimum(end, S)
    elif TWO_SIDED:
        i = t + (S - T if offset is None else offset)
        first = tl.maximum(i - window + 1, 0)
        end = tl.minimum(i + window, S)
        if PACKED:
            first = tl.maximum(first, tl.load(first_ptr + t))
            end = tl.minimum(end, tl.load(query_last_ptr + t) + 1)
    else:
        first = t * 0
        end = t * 0 + S
    return first, end


@triton.jit
def key_tile(  # type: ignore[no-untyped-def]
    source, b, g, n, stride, S,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, CLAMP: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Loads rows n … n + BN of keys or values. Rows past the end must be masked.

    `source` is a descriptor of the whole tensor, which Hopper's TMA reads, or a pointer to this batch and head.
    TMA fills with zeros; through a pointer the last row is read again.
    """
    if TMA:
        return source.load([b, n, g, 0]).reshape(BN, DP)
    else:
        rows = tl.arange(0, BN)
        if CLAMP:
            rows = tl.minimum(rows, S - 1 - n)
        d = tl.arange(0, DP)
        where = source + n.to(tl.int64) * stride + (rows[:, None] * stride + d[None, :])
        if D == DP:
            return tl.load(where)
        else:
            return tl.load(where, mask=d[None, :] < D, other=0.0)


@triton.jit
def row_tile(ptr, r, stride_t, stride_h, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Loads rows `r` (all in bounds) of queries or a tensor of their shape."""
    d = tl.arange(0, DP)
    offset = (r // G).to(tl.int64) * stride_t + (r % G).to(tl.int64) * stride_h
    where = ptr + (offset[:, None] + d[None, :])
    if D == DP:
        return tl.load(where)
    else:
        return tl.load(where, mask=d[None, :] < D, other=0.0)


@triton.jit
def store_rows(ptr, x, r, R, stride_t, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stores rows to a contiguous tensor of the queries' shape; `ptr` is at this group's first head."""
    d = tl.arange(0, DP)
    offset = (r // G).to(tl.int64) * stride_t + (r % G) * D
    inside = (r < R)[:, None]
    if D != DP:
        inside = inside & (d[None, :] < D)
    tl.store(ptr + (offset[:, None] + d[None, :]), x.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def has_non_finite(x):  # type: ignore[no-untyped-def]
    """1 if a tile contains NaN or infinity, else 0: a scalar."""
    return tl.max(tl.where(tl.abs(x) < float("inf"), 0, 1))


@triton.jit
def one_row(ptr, D: tl.constexpr, DP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Loads the DP elements of one head at `ptr`, in fp32."""
    d = tl.arange(0, DP)
    if D == DP:
        return tl.load(ptr + d).to(tl.float32)
    else:
        return tl.load(ptr + d, mask=d < D, other=0.0).to(tl.float32)


@triton.jit
def tanh(x):  # type: ignore[no-untyped-def]
    """tanh, near zero by its series: 1 − 2/(1 + e²ˣ) loses precision there, which matters for a soft cap of 50."""
    x2 = x * x
    near = x * (1.0 + x2 * (-0.33333333 + x2 * (0.13333333 - x2 * 0.053968254)))
    e = tl.exp2(-2.8853900817779268 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(x) < 0.2, near, tl.where(x < 0, -far, far))


@triton.jit
def sink_only(ptr):  # type: ignore[no-untyped-def]
    """(maximum in units of log 2, sum of exp) of rows with their sink and no key yet: a logit whose value is 0."""
    m = tl.load(ptr).to(tl.float32) * 1.4426950408889634
    return m, tl.where(m == float("-inf"), 0.0, 1.0)


@triton.jit
def attend(  # type: ignore[no-untyped-def]
    q, k_ptr, v_ptr, b, g, n, acc, m, total, first, end, S, stride_k, stride_v, inner, outer,
    MASKED: tl.constexpr, SOFTCAP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Processes one block of keys; returns the updated output acc, running maximum m and sum of exp. Scores are in
    units of log 2."""
    k = key_tile(k_ptr, b, g, n, stride_k, S, D, DP, BN, MASKED, TMA)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    v = key_tile(v_ptr, b, g, n, stride_v, S, D, DP, BN, MASKED, TMA)
    if SOFTCAP:
        s = tanh(s * inner) * outer
        factor = 1.0
    else:
        factor = inner
    if MASKED:
        j = n + tl.arange(0, BN)
        seen = (j[None, :] >= first[:, None]) & (j[None, :] < end[:, None])
        s = tl.where(seen, s, float("-inf"))
    new = tl.maximum(m, tl.max(s, 1) * factor)
    # A row without a visible key so far has a maximum of −∞, and −∞ − −∞ is NaN.
    base = tl.where(new == float("-inf"), 0.0, new) if MASKED else new
    p = tl.exp2(s * factor - base[:, None])
    shrink = tl.exp2(m - base)
    total = total * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None]
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, new, total


@triton.jit
def attend_by_key(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, o_ptr, sinks_ptr, first_ptr, query_last_ptr, r0, low, high,
    stride_qt, stride_qh, stride_k, stride_v, T, S, H, window, inner, outer, offset,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    CAUSAL: tl.constexpr, TWO_SIDED: tl.constexpr, PACKED: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Recomputes o of ROWS_PER_PASS rows, keys low … high one at a time: o = Σ p · v over a row's visible keys."""
    R = T * G
    r = r0 + tl.arange(0, ROWS_PER_PASS)
    inside = tl.minimum(r, R - 1)
    q = row_tile(q_ptr, inside, stride_qt, stride_qh, G, D, DP).to(tl.float32)
    first, end = interval(
        inside // G, first_ptr, query_last_ptr, T, S, window, offset, CAUSAL, TWO_SIDED, PACKED
    )
    m = tl.full((ROWS_PER_PASS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS_PER_PASS,), tl.float32)
    if sinks_ptr is not None:
        m, total = sink_only(sinks_ptr + inside % G)
    acc = tl.zeros((ROWS_PER_PASS, DP), tl.float32)
    for j in tl.range(low, high, num_stages=1):
        row = tl.cast(j, tl.int64)
        s = tl.sum(q * one_row(k_ptr + row * stride_k, D, DP)[None, :], 1) * inner
        if SOFTCAP:
            s = tanh(s) * outer
        seen = (j >= first) & (j < end)
        s = tl.where(seen, s, float("-inf"))
        new = tl.maximum(m, s)
        base = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2(s - base)
        shrink = tl.exp2(m - base)
        total = total * shrink + p
        v = one_row(v_ptr + row * stride_v, D, DP)[None, :]
        acc = acc * shrink[:, None] + tl.where(seen[:, None], p[:, None] * v, 0.0)
        m = new
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.debug_barrier()  # orders after the tile's own stores, whichever threads wrote them
    store_rows(o_ptr, acc, r, R, H * D, G, D, DP)


@triton.jit(do_not_specialize=["T", "S", "window", "offset"])
def attention_forward_kernel(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, k_rows_ptr, v_rows_ptr, o_ptr, lse_ptr, first_ptr,
    stride_qb, stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    T, S, K, window, inner, outer, sinks_ptr, query_last_ptr, offset,
    G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, TWO_SIDED: tl.constexpr, PACKED: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Computes o and its log-sum-exp for a tile of rows of one (batch, key/value head).

    k_ptr and v_ptr may be descriptors; k_rows_ptr and v_rows_ptr point to the same tensors. sinks_ptr (a logit per
    head), query_last_ptr (the last key of each query's document, where attention is not causal) and offset are None in
    calls that need none of them.
    """
    R = T * G
    num_tiles = tl.cdiv(R, BR)
    tile = num_tiles - 1 - tl.program_id(0) % num_tiles  # the last rows have most keys and start first
    b, g = tl.program_id(0) // num_tiles // K, tl.program_id(0) // num_tiles % K
    b64, g64 = b.to(tl.int64), g.to(tl.int64)
    q_ptr += b64 * stride_qb + g64 * G * stride_qh
    if not TMA:
        k_ptr += b64 * stride_kb + g64 * stride_kh
        v_ptr += b64 * stride_vb + g64 * stride_vh
    first_ptr += b64 * T
    if query_last_ptr is not None:
        query_last_ptr += b64 * T
    if sinks_ptr is not None:
        sinks_ptr += g * G

    r = tile * BR + tl.arange(0, BR)
    inside = tl.minimum(r, R - 1)
    q = row_tile(q_ptr, inside, stride_qt, stride_qh, G, D, DP)
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
    # Blocks from `low` on: `left` partially masked, `whole` unmasked, then masked ones up to `high`.
    left = tl.cdiv(tl.maximum(all_first - low, 0), BN)
    whole = tl.maximum(all_end - low - left * BN, 0) // BN
    count = tl.cdiv(tl.maximum(high - low, 0), BN)

    m = tl.full((BR,), float("-inf"), tl.float32)
    total = tl.zeros((BR,), tl.float32)
    if sinks_ptr is not None:
        m, total = sink_only(sinks_ptr + inside % G)
    acc = tl.zeros((BR, DP), tl.float32)
    for block in range(left, left + whole):
        acc, m, total = attend(
            q, k_ptr, v_ptr, b, g, low + block * BN, acc, m, total, first, end, S, stride_kt, stride_vt,
            inner, outer, False, SOFTCAP, D, DP, BN, PRECISION, TMA,
        )  # fmt: skip
    for index in range(count - whole):
        block = tl.where(index < left, index, index + whole)
        acc, m, total = attend(
            q, k_ptr, v_ptr, b, g, low + block * BN, acc, m, total, first, end, S, stride_kt, stride_vt,
            inner, outer, True, SOFTCAP, D, DP, BN, PRECISION, TMA,
        )  # fmt: skip

    no_keys = total == 0.0
    acc = acc / tl.where(no_keys, 1.0, total)[:, None]
    lse = tl.where(no_keys, float("-inf"), (m + tl.log2(tl.where(no_keys, 1.0, total))) * 0.6931471805599453)
    H = K * G
    store_rows(o_ptr + (b64 * T * H + g * G) * D, acc, r, R, H * D, G, D, DP)
    tl.store(lse_ptr + b64 * T * H + g * G + (r // G).to(tl.int64) * H + r % G, lse, mask=r < R)

    if PACKED:  # noqa: SIM102  (decided at compile time, the next one not)
        if has_non_finite(acc) != 0:
            for r0 in tl.range(tile * BR, tl.minimum(tile * BR + BR, R), ROWS_PER_PASS, num_stages=1):
                attend_by_key(
                    q_ptr, k_rows_ptr + b64 * stride_kb + g64 * stride_kh,
                    v_rows_ptr + b64 * stride_vb + g64 * stride_vh,
                    o_ptr + (b64 * T * H + g * G) * D, sinks_ptr, first_ptr, query_last_ptr, r0, low, high,
                    stride_qt, stride_qh, stride_kt, stride_vt, T, S, H, window, inner, outer, offset,
                    G, D, DP, CAUSAL, TWO_SIDED, PACKED, SOFTCAP,
                )  # fmt: skip
