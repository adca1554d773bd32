"""Attention with grouped heads (GQA), packed documents and sliding windows; causal, or not with `causal=False`.

For a query t at position i = t + offset (offset = S − T by default: the queries are the last positions) of head h,
with g = h·K // H the key/value head it shares and A(i) the keys that it attends to,

    o_t = Σ_{j ∈ A(i)} p_tj · v_gj,      p_t = softmax_{j ∈ A(i)}( cap( scale · q_th · k_gj ) )
    A(i) = { j ≤ i,  i − j < window,  document(j) = document(i) }      causal
    A(i) = { |i − j| < window,  document(j) = document(i) }            otherwise

with cap(s) = softcap · tanh(s / softcap), or s without a soft cap. With sinks the softmax has one more logit, sink_h,
whose value is 0.

Every backend is exact, and the output of a fully masked query is zero. `impl` names the backend; `choose_attention`
selects one and returns the reason.
"""

# B batch, T queries, S keys and values, H query heads, K key/value heads, D head size

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from trimtab.kernels.attention.spec import BIDIRECTIONAL, CAPPED, IMPLS, WITH_LSE, WITH_OFFSET, WITH_SINKS

if TYPE_CHECKING:
    import torch

    from trimtab.kernels.attention.choice import choose_attention
    from trimtab.kernels.attention.layout import Layout

SMALLEST_NORMAL = 2.0**-126
"""Smallest normal fp32; kernels scale in fp32, and below it a GPU may flush the scale to 0."""

__all__ = ["IMPLS", "Layout", "attention", "choose_attention"]


@overload
def attention(
    q_BTHD: torch.Tensor,
    k_BSKD: torch.Tensor,
    v_BSKD: torch.Tensor,
    *,
    layout: Layout,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    causal: bool = True,
    offset: int | None = None,
    sinks_H: torch.Tensor | None = None,
    return_lse: Literal[False] = False,
    impl: str,
) -> torch.Tensor: ...


@overload
def attention(
    q_BTHD: torch.Tensor,
    k_BSKD: torch.Tensor,
    v_BSKD: torch.Tensor,
    *,
    layout: Layout,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    causal: bool = True,
    offset: int | None = None,
    sinks_H: torch.Tensor | None = None,
    return_lse: Literal[True],
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def attention(
    q_BTHD: torch.Tensor,
    k_BSKD: torch.Tensor,
    v_BSKD: torch.Tensor,
    *,
    layout: Layout,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    causal: bool = True,
    offset: int | None = None,
    sinks_H: torch.Tensor | None = None,
    return_lse: bool = False,
    impl: str,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Computes attention with grouped heads, causal by default.

    Args:
        q_BTHD: Queries. With more keys than queries (a key/value cache) they are the last T positions, or those
            that `offset` gives.
        k_BSKD, v_BSKD: Keys and values; K divides H.
        layout: `Layout.causal()`, or `Layout.packed(documents_BT)` for sequences of several packed documents.
            Create it once per batch and pass it to every layer.
        window: Sliding window: maximum number of keys on each side, its own included, that a query attends to; None
            for all.
        scale: Scale of the scores; 1/√D by default.
        softcap: Soft cap of the scores: softcap · tanh(score / softcap); None for none.
        causal: Whether to apply a causal mask. Otherwise a query attends to all keys of its document, or to those less
            than `window` tokens away.
        offset: Position of the first query relative to the first key; S − T by default. Arbitrary without packed
            documents: queries may be before the first key or after the last one.
        sinks_H: A learned logit per query head in the denominator of the softmax (gpt-oss), not affected by
            `softcap`; it gets a gradient.
        return_lse: Whether to also return the log-sum-exp of each query's scores, which is differentiable.
        impl: One of `IMPLS`. Raises if it does not support these inputs; there is no fallback.

    Returns:
        o_BTHD in q's dtype; with `return_lse` also lse_BTH = log Σ_j exp(score_tj) in fp32 (fp64 for fp64 inputs),
        the sink included, −∞ for a fully masked query. Its axes are those of o without the last, so that
        `lse_BTH[..., None]` broadcasts against o where partial results over several sets of keys are combined.

    Example:
        >>> import torch
        >>> from trimtab.kernels.attention import Layout, attention
        >>> q, k, v = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 8)
        >>> attention(q, k, v, layout=Layout.causal(), impl="reference").shape
        torch.Size([2, 5, 4, 8])
    """
    from trimtab.kernels.attention.layout import effective_window

    T, S = q_BTHD.shape[1], k_BSKD.shape[1]
    assert q_BTHD.shape[2] % k_BSKD.shape[2] == 0, "query heads must be a multiple of key/value heads"
    assert window is None or window >= 1, "window must be at least 1"
    assert softcap is None or softcap > 0, "softcap must be positive"
    assert sinks_H is None or sinks_H.shape == q_BTHD.shape[2:3], "sinks must be [query heads]"
    offset = S - T if offset is None else offset
    # Causal queries before the first key are fully masked. They are removed here and their zeros prepended below, so
    # that few backends have to handle a softmax without keys.
    num_masked = T if S == 0 else min(max(-offset, 0), T) if causal else 0
    if num_masked:
        q_BTHD, T, offset = q_BTHD[:, num_masked:], T - num_masked, offset + num_masked
    window = effective_window(window, T, S, offset, causal)
    if not causal and window is None and not layout.is_packed:
        offset = S - T  # nothing is masked, so positions do not matter
    if q_BTHD.numel() == 0:
        # Empty sums, so that keys, values and sinks get zero gradients.
        o_BTHD = q_BTHD.clone() + (k_BSKD[:0].sum() + v_BSKD[:0].sum())
        o_BTHD = o_BTHD if sinks_H is None else o_BTHD + sinks_H[:0].sum().to(o_BTHD.dtype)
        lse_BTH = o_BTHD.sum(-1, dtype=_statistics_dtype(q_BTHD)) if return_lse else None
    else:
        scale = q_BTHD.shape[-1] ** -0.5 if scale is None else scale
        # Tiled kernels compute a row's maximum before they scale: with a negative scale it would be the minimum (the
        # CPU kernel returns NaN), and 0 times the −∞ of a masked score is NaN. So the queries are scaled first.
        if scale < 0:
            q_BTHD, scale = -q_BTHD, -scale
        if scale < SMALLEST_NORMAL:
            q_BTHD, scale = q_BTHD * scale, 1.0
        o_BTHD, lse_BTH = _dispatch(
            q_BTHD, k_BSKD, v_BSKD, layout, window, scale, softcap, causal, offset, sinks_H, return_lse, impl
        )
    if num_masked:
        o_BTHD, lse_BTH = _prepend_masked_queries(num_masked, o_BTHD, lse_BTH, sinks_H)
    if not return_lse:
        return o_BTHD
    assert lse_BTH is not None, f"{impl} is in WITH_LSE"
    return o_BTHD, lse_BTH


def _prepend_masked_queries(
    num_masked: int, o_BTHD: torch.Tensor, lse_BTH: torch.Tensor | None, sinks_H: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Prepends the results of `num_masked` fully masked queries, which attend to no key, or only to their sink."""
    import torch
    import torch.nn.functional as F

    o_BTHD = F.pad(o_BTHD, (0, 0, 0, 0, num_masked, 0))
    if lse_BTH is not None and sinks_H is not None:
        sinks_BTH = sinks_H.to(lse_BTH.dtype).expand(lse_BTH.shape[0], num_masked, -1)
        lse_BTH = torch.cat([sinks_BTH, lse_BTH], dim=1)
    elif lse_BTH is not None:
        lse_BTH = F.pad(lse_BTH, (0, 0, num_masked, 0), value=float("-inf"))
    return o_BTHD, lse_BTH


def _statistics_dtype(q_BTHD: torch.Tensor) -> torch.dtype:
    import torch

    return torch.promote_types(q_BTHD.dtype, torch.float32)


def _check_supported(
    impl: str, softcap: float | None, causal: bool, at_end: bool, sinks: bool, return_lse: bool
) -> None:
    """Raises if a backend does not support a call's arguments."""
    for requested, supporting, limitation in (
        (softcap is not None, CAPPED, "does not support softcap"),
        (not causal, BIDIRECTIONAL, "supports causal attention only"),
        (not at_end, WITH_OFFSET, "requires the queries to be the last positions"),
        (sinks, WITH_SINKS, "does not support sinks"),
        (return_lse, WITH_LSE, "does not return a differentiable log-sum-exp"),
    ):
        if requested and impl in IMPLS and impl not in supporting:
            from trimtab.facts.errors import ModelError

            raise ModelError(f"{impl} {limitation}", f"use one of {', '.join(supporting)}")


def _dispatch(
    q_BTHD: torch.Tensor,
    k_BSKD: torch.Tensor,
    v_BSKD: torch.Tensor,
    layout: Layout,
    window: int | None,
    scale: float,
    softcap: float | None,
    causal: bool,
    offset: int,
    sinks_H: torch.Tensor | None,
    return_lse: bool,
    impl: str,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns (o_BTHD, lse_BTH or None)."""
    at_end = offset == k_BSKD.shape[1] - q_BTHD.shape[1] and layout.first_key is None
    _check_supported(impl, softcap, causal, at_end, sinks_H is not None, return_lse)
    # Static imports in an if/elif: torch.compile traces through them; importlib would break the graph.
    if impl == "reference":
        from trimtab.kernels.attention.impl_reference import attention_reference

        return attention_reference(
            q_BTHD, k_BSKD, v_BSKD, layout, window, scale, softcap, return_lse, causal, offset, sinks_H
        )
    elif impl in ("sdpa_math", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn"):
        from trimtab.kernels.attention.impl_sdpa import attention_sdpa

        return attention_sdpa(q_BTHD, k_BSKD, v_BSKD, layout, window, scale, impl, causal, offset), None
    elif impl == "varlen":
        from trimtab.kernels.attention.impl_varlen import attention_varlen

        return attention_varlen(q_BTHD, k_BSKD, v_BSKD, layout, window, scale), None
    elif impl == "flex":
        from trimtab.kernels.attention.impl_flex import attention_flex

        return attention_flex(q_BTHD, k_BSKD, v_BSKD, layout, window, scale, softcap), None
    elif impl == "triton":
        from trimtab.kernels.attention.impl_triton import attention_triton

        return attention_triton(
            q_BTHD, k_BSKD, v_BSKD, layout, window, scale, softcap, return_lse, causal, offset, sinks_H
        )
    else:
        from trimtab.facts.errors import ModelError

        raise ModelError(f"unknown attention implementation {impl!r}", f"use one of {', '.join(IMPLS)}")


def __getattr__(name: str) -> Any:
    if name == "Layout":
        from trimtab.kernels.attention.layout import Layout

        return Layout
    if name == "choose_attention":
        from trimtab.kernels.attention import choice

        return choice.choose_attention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
