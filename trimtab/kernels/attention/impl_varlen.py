"""FlashAttention over the flattened batch with cumulative document offsets (torch.nn.attention.varlen).

Tiles across documents are skipped, and without a materialized mask memory is linear in the sequence length.
"""

# B batch, T queries, S keys, H query heads, K key/value heads, D head size, N = B·T, M = B·S

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn

from trimtab.facts.errors import ModelError
from trimtab.kernels.attention.layout import Layout

# The kernel supports GQA; from torch 2.12 on, varlen_attn needs a flag for it.
NEEDS_GQA_FLAG = "enable_gqa" in inspect.signature(varlen_attn).parameters


def attention_varlen(
    q_BTHD: torch.Tensor,
    k_BSKD: torch.Tensor,
    v_BSKD: torch.Tensor,
    layout: Layout,
    window: int | None,
    scale: float,
) -> torch.Tensor:
    """See `trimtab.kernels.attention.attention`; bf16 and fp16 on GPUs of capability 8.0 and above."""
    if not q_BTHD.is_cuda or q_BTHD.dtype not in (torch.bfloat16, torch.float16):
        raise ModelError(
            f"varlen attention requires bf16 or fp16 on a GPU, not {q_BTHD.dtype} on {q_BTHD.device.type}",
            "use sdpa_flash on a CPU, sdpa_efficient for fp32 on a GPU",
        )
    B, T, H, _ = q_BTHD.shape
    S, K = k_BSKD.shape[1], k_BSKD.shape[2]
    offsets = layout.prepare("varlen", q_BTHD.device, T, window, S=S, B=B)
    extra: dict[str, Any] = {"enable_gqa": True} if NEEDS_GQA_FLAG and H != K else {}
    o_NHD: Any = varlen_attn(
        q_BTHD.flatten(0, 1),
        k_BSKD.flatten(0, 1),
        v_BSKD.flatten(0, 1),
        offsets.starts_q,
        offsets.starts_k,
        offsets.longest_q,
        offsets.longest_k,
        scale=scale,
        # (left, right) neighbours of the query's own key; aligned at the end where S > T.
        window_size=(-1 if window is None else window - 1, 0),
        **extra,
    )
    return o_NHD.view(q_BTHD.shape)
