"""torch's scaled_dot_product_attention with one backend at a time, so that there is no fallback to another."""

# B batch, T queries, S keys, H query heads, K key/value heads, D head size

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from trimtab.facts.errors import ModelError
from trimtab.kernels.attention.layout import Layout

BACKENDS = {
    "sdpa_math": SDPBackend.MATH,
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
}


def attention_sdpa(
    q_BTHD: torch.Tensor,
    k_BSKD: torch.Tensor,
    v_BSKD: torch.Tensor,
    layout: Layout,
    window: int | None,
    scale: float,
    impl: str,
    causal: bool,
    offset: int,
) -> torch.Tensor:
    """See `trimtab.kernels.attention.attention`."""
    T, S = q_BTHD.shape[1], k_BSKD.shape[1]
    num_padding = 0
    if q_BTHD.is_cuda and impl in ("sdpa_flash", "sdpa_cudnn"):
        if layout.is_packed or window is not None:
            raise ModelError(
                f"{impl} on a GPU supports neither packed documents nor a sliding window",
                "use varlen or flex, or set auto",
            )
        if causal and offset != S - T:
            raise ModelError(
                f"{impl} on a GPU supports no mask, so causal queries must be the last positions, not from {offset}",
                "use triton or sdpa_efficient",
            )
        # These backends support no mask, and SDPA's is_causal aligns the first query with the first key. So queries
        # after a cache are padded in front; a single query attends to all keys and needs no mask.
        num_padding = S - T if T > 1 and causal else 0
    elif impl in ("sdpa_efficient", "sdpa_cudnn") and not q_BTHD.is_cuda:
        raise ModelError(f"{impl} requires a GPU", "use sdpa_flash on a CPU")

    if num_padding:
        q_BTHD = F.pad(q_BTHD, (0, 0, 0, 0, num_padding, 0))
        T, offset = S, 0
    mask = layout.prepare(
        impl, q_BTHD.device, T, window, S=S, dtype=q_BTHD.dtype, causal=causal, offset=offset
    )
    grouped = q_BTHD.shape[2] != k_BSKD.shape[2]
    if grouped and impl == "sdpa_efficient":  # the only backend without GQA support
        group = q_BTHD.shape[2] // k_BSKD.shape[2]
        k_BSKD, v_BSKD = k_BSKD.repeat_interleave(group, dim=2), v_BSKD.repeat_interleave(group, dim=2)
        grouped = False
    bias = mask.bias
    if bias is not None and q_BTHD.is_cuda:
        bias = bias.expand(q_BTHD.shape[0], q_BTHD.shape[2], -1, -1)
    with sdpa_kernel(BACKENDS[impl]):
        o_BHTD = F.scaled_dot_product_attention(
            q_BTHD.transpose(1, 2),
            k_BSKD.transpose(1, 2),
            v_BSKD.transpose(1, 2),
            attn_mask=bias,
            is_causal=mask.is_causal,
            scale=scale,
            enable_gqa=grouped,
        )
    o_BTHD = o_BHTD.transpose(1, 2)[:, num_padding:]
    return (
        o_BTHD
        if mask.fully_masked_BT is None
        else o_BTHD.masked_fill(mask.fully_masked_BT[:, :, None, None], 0.0)
    )
