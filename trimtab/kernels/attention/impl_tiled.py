"""A readable FlashAttention-2: the tiled algorithm in plain PyTorch, with its own backward.

The forward pass loops over tiles of keys and updates, per query, the running maximum m, the sum l of exp(s − m) and the
output; when the maximum grows, the previous sums are rescaled by exp(m_old − m_new). In addition to inputs and output
the backward pass needs only L = m + log l, one value per query: p = exp(s − L) is the softmax, and with
D = rowsum(O ∘ dO)

    dV = pᵀ dO,   dp = dO Vᵀ,   ds = p ∘ (dp − D),   dQ = ds K / √d,   dK = dsᵀ Q / √d.

`FlashAttentionWithLSE` also returns L, to combine results over parts of the keys. Since ∂L/∂s = p,
a gradient dL adds p ∘ dL to ds: D − dL replaces D, and nothing else changes.

`impl_triton.FlashAttention` is the same function with Triton kernels. Both are for readers of the algorithm and for
tests; no recipe and no `impl=` uses them.
"""

# n_q queries, n_k keys, d head size; tiles of TILE × TILE; all tensors have a leading batch axis

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

TILE = 64


class FlashAttention(torch.autograd.Function):
    """O = softmax(Q Kᵀ / √d) V for one head, without materializing the (n_q, n_k) matrix.

    Example:
        >>> Q, K, V = (torch.randn(4, 128, 64, requires_grad=True) for _ in range(3))
        >>> O = FlashAttention.apply(Q, K, V, True)
        >>> O.shape, [tuple(x.shape) for x in O.grad_fn.saved_tensors][-1]
        (torch.Size([4, 128, 64]), (4, 128))
    """

    @staticmethod
    def forward(
        ctx: Any, Q: torch.Tensor, K: torch.Tensor, V: torch.Tensor, is_causal: bool = False
    ) -> torch.Tensor:
        """Q (batch, n_q, d), K and V (batch, n_k, d) → O (batch, n_q, d).

        With `is_causal` the queries are the last n_q positions of the n_k keys; the output of a fully masked query
        (n_q > n_k) is zero.
        """
        O, L = _forward(Q, K, V, is_causal)  # noqa: E741
        ctx.save_for_backward(Q, K, V, O, L)
        ctx.is_causal = is_causal
        return O

    @staticmethod
    def backward(ctx: Any, dO: torch.Tensor) -> tuple[Any, ...]:
        """Returns (dQ, dK, dV, None); recomputes each tile of scores."""
        return *_backward(dO, None, *ctx.saved_tensors, is_causal=ctx.is_causal), None


class FlashAttentionWithLSE(torch.autograd.Function):
    """(O, L) of one head, both differentiable; L = log Σ exp s is (batch, n_q), −∞ for fully masked queries.

    Example:
        >>> Q, K, V = (torch.randn(4, 128, 64, requires_grad=True) for _ in range(3))
        >>> O, L = FlashAttentionWithLSE.apply(Q, K, V, True)
        >>> L.sum().backward()
    """

    @staticmethod
    def forward(
        ctx: Any, Q: torch.Tensor, K: torch.Tensor, V: torch.Tensor, is_causal: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Like `FlashAttention.forward`; also returns L."""
        O, L = _forward(Q, K, V, is_causal)  # noqa: E741
        ctx.save_for_backward(Q, K, V, O, L)
        ctx.is_causal = is_causal
        return O, L

    @staticmethod
    def backward(ctx: Any, dO: torch.Tensor, dL: torch.Tensor) -> tuple[Any, ...]:
        """Returns (dQ, dK, dV, None)."""
        return *_backward(dO, dL, *ctx.saved_tensors, is_causal=ctx.is_causal), None


def _forward(
    Q: torch.Tensor, K: torch.Tensor, V: torch.Tensor, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (O, L)."""
    batch, n_q, d = Q.shape
    n_k, scale = K.shape[1], 1 / math.sqrt(d)
    accumulate = torch.promote_types(Q.dtype, torch.float32)
    O = torch.empty_like(Q, memory_format=torch.contiguous_format)  # noqa: E741
    L = torch.empty(batch, n_q, dtype=accumulate, device=Q.device)
    for queries in _tiles(0, n_q):
        q = Q[:, queries].to(accumulate)
        m = q.new_full((batch, q.shape[1]), -math.inf)
        l = q.new_zeros(batch, q.shape[1])  # noqa: E741
        o = torch.zeros_like(q)
        for keys in _tiles(0, _visible_end(queries, n_q, n_k, is_causal)):
            s = q @ K[:, keys].to(accumulate).mT * scale
            if is_causal:
                s = s.masked_fill(_masked_keys(queries, keys, n_q, n_k, Q.device), -math.inf)
            m_new = torch.maximum(m, s.amax(-1))
            base = m_new.masked_fill(m_new == -math.inf, 0)  # no visible key yet: −∞ − −∞ is NaN
            p = torch.exp(s - base[..., None])
            shrink = torch.exp(m - base)
            l = l * shrink + p.sum(-1)  # noqa: E741
            o = o * shrink[..., None] + p @ V[:, keys].to(accumulate)
            m = m_new
        O[:, queries] = (o / l.masked_fill(l == 0, 1)[..., None]).to(O.dtype)
        L[:, queries] = m + l.log()  # −∞ for fully masked queries
    return O, L


def _backward(
    dO: torch.Tensor,
    dL: torch.Tensor | None,
    Q: torch.Tensor,
    K: torch.Tensor,
    V: torch.Tensor,
    O: torch.Tensor,  # noqa: E741
    L: torch.Tensor,
    *,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (dQ, dK, dV); recomputes each tile of scores."""
    n_q, n_k, scale = Q.shape[1], K.shape[1], 1 / math.sqrt(Q.shape[-1])
    accumulate = L.dtype
    D = (O.to(accumulate) * dO.to(accumulate)).sum(-1)
    is_fully_masked = L.isneginf()
    if dL is not None:
        D = D - dL.masked_fill(is_fully_masked, 0)  # for fully masked queries L is a constant
    dQ, dK, dV = (torch.zeros(x.shape, dtype=accumulate, device=x.device) for x in (Q, K, V))
    for queries in _tiles(0, n_q):
        q, do = Q[:, queries].to(accumulate), dO[:, queries].to(accumulate)
        lse = L[:, queries].masked_fill(is_fully_masked[:, queries], math.inf)  # then p = exp(−∞) = 0
        for keys in _tiles(0, _visible_end(queries, n_q, n_k, is_causal)):
            k, v = K[:, keys].to(accumulate), V[:, keys].to(accumulate)
            p = torch.exp(q @ k.mT * scale - lse[..., None])
            if is_causal:
                p = p.masked_fill(_masked_keys(queries, keys, n_q, n_k, Q.device), 0)
            dV[:, keys] += p.mT @ do
            ds = p * (do @ v.mT - D[:, queries, None]) * scale
            dQ[:, queries] += ds @ k
            dK[:, keys] += ds.mT @ q
    return dQ.to(Q.dtype), dK.to(K.dtype), dV.to(V.dtype)


def _tiles(start: int, stop: int) -> Iterator[slice]:
    for i in range(start, stop, TILE):
        yield slice(i, min(i + TILE, stop))


def _visible_end(queries: slice, n_q: int, n_k: int, is_causal: bool) -> int:
    """End of the keys visible to any of these queries: later tiles are skipped."""
    return max(min(queries.stop + n_k - n_q, n_k), 0) if is_causal else n_k


def _masked_keys(queries: slice, keys: slice, n_q: int, n_k: int, device: torch.device) -> torch.Tensor:
    """The mask of a tile: keys after each query."""
    i = torch.arange(queries.start, queries.stop, device=device)[:, None] + n_k - n_q
    return torch.arange(keys.start, keys.stop, device=device) > i
