"""FlexAttention: a kernel generated from the mask function; a block mask skips empty tiles.

Always compiled: in eager mode it would materialize the scores, like the reference. Outside a compiled region the first
call takes seconds. On a CPU torch implements only the forward pass.
"""

# B batch, T queries, S keys, H query heads, K key/value heads, D head size

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from trimtab.facts.errors import ModelError
from trimtab.kernels.attention.layout import Layout
from trimtab.kernels.attention.spec import MIN_FLEX_QUERIES

BLOCK = 128
"""Queries and keys of a block: the block size of FlexAttention's kernels."""

# fullgraph: past the recompile limit torch then raises, instead of running uncompiled with a warning.
_compiled = torch.compile(flex_attention, fullgraph=True)


def attention_flex(
    q_BTHD: torch.Tensor,
    k_BSKD: torch.Tensor,
    v_BSKD: torch.Tensor,
    layout: Layout,
    window: int | None,
    scale: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """See `trimtab.kernels.attention.attention`."""
    needs_grad = q_BTHD.requires_grad or k_BSKD.requires_grad or v_BSKD.requires_grad
    if not q_BTHD.is_cuda and needs_grad and torch.is_grad_enabled():
        raise ModelError("FlexAttention has no backward on a CPU", "use sdpa_flash to train there")
    T, S = q_BTHD.shape[1], k_BSKD.shape[1]
    if q_BTHD.is_cuda and T < MIN_FLEX_QUERIES:
        raise ModelError(
            f"FlexAttention on a GPU needs {MIN_FLEX_QUERIES} queries, there are {T}",
            "use triton or sdpa_flash",
        )
    blocks = layout.prepare("flex", q_BTHD.device, T, window, S=S)
    call = flex_attention if torch.compiler.is_compiling() else _compiled
    o_BHTD = call(
        q_BTHD.transpose(1, 2),
        k_BSKD.transpose(1, 2),
        v_BSKD.transpose(1, 2),
        score_mod=None if softcap is None else _capped(softcap),
        block_mask=blocks,
        scale=scale,
        enable_gqa=q_BTHD.shape[2] != k_BSKD.shape[2],
    )
    return o_BHTD.transpose(1, 2)


@functools.cache  # one function per cap: a new one per call would recompile
def _capped(softcap: float) -> Callable[..., torch.Tensor]:
    def score_mod(score: torch.Tensor, b: Any, h: Any, t: Any, s: Any) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return score_mod


def block_mask(
    first_BT: torch.Tensor | None, T: int, S: int, window: int | None, device: torch.device
) -> BlockMask:
    """Returns the mask of `Layout.visible` as blocks of 128 × 128: skipped, full, or partially masked.

    It is built from the first visible key of each query, which never decreases within a row, without evaluating every
    pair: a block of queries attends to an interval of keys, from the first query's first key to the last query's own.

    Args:
        first_BT: Start of each token's document; None if each row is one document.
        T, S: Queries and keys; the queries are the last T positions.
        window: Sliding window, in keys.
    """
    shift = S - T
    queries, keys = -(-T // BLOCK), -(-S // BLOCK)
    start_Q = torch.arange(queries, device=device) * BLOCK
    end_Q = (start_Q + BLOCK - 1).clamp(max=T - 1)
    lowest_BQ, highest_BQ = (_first_key(first_BT, t_Q, shift, window) for t_Q in (start_Q, end_Q))
    start_K = torch.arange(keys, device=device) * BLOCK
    seen_BQK = (start_K + BLOCK > lowest_BQ[..., None]) & (start_K <= (end_Q + shift)[:, None])
    whole_BQK = (start_K >= highest_BQ[..., None]) & (start_K + BLOCK - 1 <= (start_Q + shift)[:, None])
    whole_BQK = whole_BQK & (start_Q + BLOCK <= T)[:, None]

    def mask_mod(b: torch.Tensor, h: torch.Tensor, t: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        seen = s <= t + shift
        if window is not None:
            seen = seen & (t + shift - s < window)
        if first_BT is not None:
            seen = seen & (s >= first_BT[b, t])
        return seen

    return BlockMask.from_kv_blocks(
        *_ordered(seen_BQK & ~whole_BQK),
        *_ordered(whole_BQK),
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(T, S),
    )


def _first_key(
    first_BT: torch.Tensor | None, t_Q: torch.Tensor, shift: int, window: int | None
) -> torch.Tensor:
    """The first visible key of each query, [B or 1, Q]."""
    first_BQ = torch.zeros_like(t_Q)[None] if first_BT is None else first_BT[:, t_Q].long()
    return first_BQ if window is None else torch.maximum(first_BQ, t_Q + shift - window + 1)


def _ordered(blocks_BQK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (number of key blocks, block indices with these first), each with a dimension for heads."""
    blocks_B1QK = blocks_BQK[:, None].to(torch.int8)
    order_B1QK = blocks_B1QK.argsort(dim=-1, descending=True, stable=True)
    return blocks_B1QK.sum(-1, dtype=torch.int32), order_B1QK.to(torch.int32).contiguous()
