"""FlexAttention: a kernel generated from the rule of who sees whom; a mask of blocks skips empty tiles.

Always compiled: uncompiled it would materialize the scores, which is the reference's job. Outside a compiled
region the first call takes seconds. On a CPU torch has the forward only.
"""

# B batch, T queries, S keys, H query heads, K key/value heads, D head size

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from trimtab.facts.errors import ModelError
from trimtab.kernels.attention.layout import Layout
from trimtab.kernels.attention.spec import SHORTEST_FLEX

# fullgraph: past the limit of recompilations torch then raises, instead of running uncompiled with a warning.
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
    if q_BTHD.is_cuda and T < SHORTEST_FLEX:
        raise ModelError(
            f"FlexAttention on a GPU needs {SHORTEST_FLEX} queries, there are {T}", "use triton or sdpa_flash"
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


@functools.cache  # one function for a cap: a new one each call would compile anew
def _capped(softcap: float) -> Callable[..., torch.Tensor]:
    def bend(score: torch.Tensor, b: Any, h: Any, t: Any, s: Any) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return bend


def block_mask(
    documents_BT: torch.Tensor | None, T: int, S: int, window: int | None, device: torch.device
) -> BlockMask:
    """The rule of `Layout.visible` as blocks of 128 × 128: skipped, whole, or masked inside."""
    shift = S - T

    def may_see(b: torch.Tensor, h: torch.Tensor, t: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        seen = s <= t + shift
        if window is not None:
            seen = seen & (t + shift - s < window)
        if documents_BT is not None:
            seen = seen & (documents_BT[b, t] == documents_BT[b, s])
        return seen

    B = None if documents_BT is None else documents_BT.shape[0]
    return create_block_mask(may_see, B, None, T, S, device=str(device))
