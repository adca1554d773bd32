"""Attention as two torch operators, forward and backward, with Triton kernels.

`trimtab::attention_forward` and `trimtab::attention_backward` have fake implementations and a derivative, so
that torch.compile and fake tensors trace them without a graph break.
"""

# B batch, T queries, S keys, H query heads, K key/value heads, D head size

from __future__ import annotations

import math
from typing import Any

import torch

from trimtab.kernels.attention import launch_triton
from trimtab.kernels.attention.launch_triton import NO_WINDOW, KernelArguments
from trimtab.kernels.attention.layout import Layout

_SHARED = "Tensor? first, Tensor? last, int window, float scale, float softcap, bool causal"
# Optional arguments have defaults, which the dispatcher omits from graphs.
_OPTIONAL = "Tensor? query_last=None, Tensor? key_first=None, SymInt? offset=None, Tensor? sinks=None"
_library = torch.library.Library("trimtab", "FRAGMENT")
_library.define(
    f"attention_forward(Tensor q, Tensor k, Tensor v, {_SHARED}, {_OPTIONAL}) -> (Tensor, Tensor)"
)
_library.define(
    "attention_backward(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, "
    f"{_SHARED}, {_OPTIONAL}, Tensor? dlse=None) -> (Tensor, Tensor, Tensor, Tensor)"
)


def _forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first: torch.Tensor | None,
    last: torch.Tensor | None,
    window: int,
    scale: float,
    softcap: float,
    causal: bool,
    query_last: torch.Tensor | None = None,
    key_first: torch.Tensor | None = None,
    offset: int | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    arguments = KernelArguments(window, scale, softcap, causal, offset)
    return launch_triton.forward(q, k, v, first, arguments, sinks_H=sinks, query_last_BT=query_last)


def _backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    first: torch.Tensor | None,
    last: torch.Tensor | None,
    window: int,
    scale: float,
    softcap: float,
    causal: bool,
    query_last: torch.Tensor | None = None,
    key_first: torch.Tensor | None = None,
    offset: int | None = None,
    sinks: torch.Tensor | None = None,
    dlse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (dq, dk, dv, dsinks); dsinks is empty without sinks, since an operator must return tensors."""
    dq, dk, dv, *dsinks = launch_triton.backward(
        do, q, k, v, o, lse, first, last, KernelArguments(window, scale, softcap, causal, offset),
        dlse_BTH=dlse, sinks_H=sinks, query_last_BT=query_last, key_first_BS=key_first,
    )  # fmt: skip
    return dq, dk, dv, dsinks[0] if dsinks else q.new_empty(0)


for _device in ("CUDA", "CPU"):  # on a CPU they run only in Triton's interpreter; otherwise the launch raises
    _library.impl("attention_forward", _forward, _device)
    _library.impl("attention_backward", _backward, _device)


@torch.library.register_fake("trimtab::attention_forward", lib=_library)
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.register_fake("trimtab::attention_backward", lib=_library)
def _(
    do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **more: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    sinks = rest[11] if len(rest) > 11 else more.get("sinks")
    dsinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    q, k, v, first, last, *ctx.numbers, query_last, key_first, ctx.offset, sinks = inputs
    o, lse = output
    ctx.set_materialize_grads(False)  # an unused log-sum-exp costs no tensor of zeros
    ctx.save_for_backward(q, k, v, o, lse, first, last, query_last, key_first, sinks)


def _differentiate(ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None) -> tuple[Any, ...]:
    if do is None:
        if dlse is None:
            return (None,) * 13
        do = torch.zeros_like(ctx.saved_tensors[3])
    *tensors, query_last, key_first, sinks = ctx.saved_tensors
    *grads, dsinks = torch.ops.trimtab.attention_backward(
        do, *tensors, *ctx.numbers, query_last, key_first, ctx.offset, sinks, dlse
    )
    return *grads, *(None,) * 9, None if sinks is None else dsinks


torch.library.register_autograd(
    "trimtab::attention_forward", _differentiate, setup_context=_setup_context, lib=_library
)


def attention_triton(
    q_BTHD: torch.Tensor,
    k_BSKD: torch.Tensor,
    v_BSKD: torch.Tensor,
    layout: Layout,
    window: int | None,
    scale: float,
    softcap: float | None,
    return_lse: bool,
    causal: bool,
    offset: int,
    sinks_H: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `trimtab.kernels.attention.attention`; head sizes up to 256, fp32, fp16 and bf16."""
    (B, T), S = q_BTHD.shape[:2], k_BSKD.shape[1]
    bounds = layout.prepare("triton", q_BTHD.device, T, window, S=S, B=B, causal=causal, offset=offset)
    o_BTHD, lse_BTH = torch.ops.trimtab.attention_forward(
        q_BTHD,
        k_BSKD,
        v_BSKD,
        bounds.first_BT,
        bounds.last_BS,
        NO_WINDOW if window is None else window,
        scale,
        softcap or 0.0,
        causal,
        None if causal else bounds.last_BT,
        None if causal else bounds.first_BS,
        None if offset == S - T else offset,
        sinks_H,
    )
    return o_BTHD, lse_BTH if return_lse else None


class FlashAttention(torch.autograd.Function):
    """The kernels for one head; `impl_tiled.FlashAttention` is the readable version.

    For readers of the algorithm and for tests; models call `attention_triton`.

    Example:
        >>> Q = torch.randn(4, 128, 64, device="cuda", requires_grad=True)  # doctest: +SKIP
        >>> FlashAttention.apply(Q, Q, Q, True).shape  # doctest: +SKIP
        torch.Size([4, 128, 64])
    """

    @staticmethod
    def forward(
        ctx: Any, Q: torch.Tensor, K: torch.Tensor, V: torch.Tensor, is_causal: bool = False
    ) -> torch.Tensor:
        """Q (batch, n_q, d), K and V (batch, n_k, d) → O; causal queries are the last n_q positions."""
        ctx.arguments = KernelArguments(NO_WINDOW, 1 / math.sqrt(Q.shape[-1]), 0.0, is_causal)
        q, k, v = (x.unsqueeze(2) for x in (Q, K, V))
        O, L = (x.squeeze(2) for x in launch_triton.forward(q, k, v, None, ctx.arguments))  # noqa: E741
        ctx.save_for_backward(Q, K, V, O, L)
        return O

    @staticmethod
    def backward(ctx: Any, dO: torch.Tensor) -> tuple[Any, ...]:
        """Returns (dQ, dK, dV, None)."""
        Q, K, V, O, L = (x.unsqueeze(2) for x in ctx.saved_tensors)  # noqa: E741
        grads = launch_triton.backward(dO.unsqueeze(2), Q, K, V, O, L, None, None, ctx.arguments)
        return *(x.squeeze(2) for x in grads), None
