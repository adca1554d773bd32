"""The definition, line by line: products in the inputs' dtype, softmax in fp32. Memory T × S per head."""

# B batch, T queries, S keys, H query heads, K key/value heads, D head size

from __future__ import annotations

import torch

from trimtab.kernels.attention.layout import Layout


def attention_reference(
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
    """See `trimtab.kernels.attention.attention`; differentiable by autograd, to any order."""
    T, S = q_BTHD.shape[1], k_BSKD.shape[1]
    group = q_BTHD.shape[2] // k_BSKD.shape[2]
    k_BSHD = k_BSKD.repeat_interleave(group, dim=2)
    v_BSHD = v_BSKD.repeat_interleave(group, dim=2)
    dtype = torch.promote_types(q_BTHD.dtype, torch.float32)  # fp64 stays fp64, for the ground truth of tests

    scores_BHTS = torch.einsum("bthd,bshd->bhts", q_BTHD, k_BSHD).to(dtype) * scale
    if softcap is not None:
        scores_BHTS = softcap * torch.tanh(scores_BHTS / softcap)
    mask = layout.prepare(
        "reference", q_BTHD.device, T, window, S=S, dtype=dtype, causal=causal, offset=offset
    )
    if mask.bias is not None:
        scores_BHTS = scores_BHTS + mask.bias
    elif mask.is_causal:
        later_TS = torch.ones(T, S, dtype=torch.bool, device=q_BTHD.device).triu(1)
        scores_BHTS = scores_BHTS.masked_fill(later_TS, float("-inf"))
    fully_masked_BT = mask.fully_masked_BT
    if sinks_H is not None:  # one more logit per head, whose value is 0; a fully masked query has it too
        if fully_masked_BT is not None:
            scores_BHTS = scores_BHTS.masked_fill(fully_masked_BT[:, None, :, None], float("-inf"))
            fully_masked_BT = None
        sinks_BHT1 = sinks_H.to(dtype)[:, None, None].expand(*scores_BHTS.shape[:3], 1)
        scores_BHTS = torch.cat([scores_BHTS, sinks_BHT1], dim=-1)
    p_BHTS = scores_BHTS.softmax(dim=-1).to(q_BTHD.dtype)
    if sinks_H is not None:
        p_BHTS = p_BHTS[..., :S]
    o_BTHD = torch.einsum("bhts,bshd->bthd", p_BHTS, v_BSHD)
    lse_BTH = scores_BHTS.logsumexp(dim=-1).transpose(1, 2) if return_lse else None
    if fully_masked_BT is not None:
        o_BTHD = o_BTHD.masked_fill(fully_masked_BT[:, :, None, None], 0.0)
        lse_BTH = None if lse_BTH is None else lse_BTH.masked_fill(fully_masked_BT[:, :, None], float("-inf"))
    return o_BTHD, lse_BTH
