"""RoPE in torch, as the decoder computes it; autograd computes the gradients."""

# B batch, T tokens, H query heads, K key heads, D head size, F frequencies, R = 2 F rotated elements per head

from __future__ import annotations

import torch

from trimtab.kernels.rms_norm import rms_norm


def rotate(
    x_BTHD: torch.Tensor, cos_BTF: torch.Tensor, sin_BTF: torch.Tensor, interleaved: bool = False
) -> torch.Tensor:
    """Rotates the pairs of x by the positions' angles, in the cosines' dtype, rounded once; elements after the first
    R = 2 F of a head pass through."""
    cos_BT1F, sin_BT1F = cos_BTF[:, :, None], sin_BTF[:, :, None]
    R = 2 * cos_BTF.shape[-1]
    is_partial = x_BTHD.shape[-1] > R
    x_BTHR = (x_BTHD[..., :R] if is_partial else x_BTHD).to(cos_BTF.dtype)
    a_BTHF, b_BTHF = (x_BTHR[..., 0::2], x_BTHR[..., 1::2]) if interleaved else x_BTHR.chunk(2, dim=-1)
    # Unnamed, so that the halves are freed before the result is cast: the memory plan relies on it.
    if interleaved:
        out_BTHR = torch.stack(_rotate_pairs(a_BTHF, b_BTHF, cos_BT1F, sin_BT1F), dim=-1).flatten(-2)
    else:
        out_BTHR = torch.cat(_rotate_pairs(a_BTHF, b_BTHF, cos_BT1F, sin_BT1F), dim=-1)
    out_BTHR = out_BTHR.to(x_BTHD.dtype)
    return torch.cat((out_BTHR, x_BTHD[..., R:]), dim=-1) if is_partial else out_BTHR


def _rotate_pairs(
    a_BTHF: torch.Tensor, b_BTHF: torch.Tensor, cos_BT1F: torch.Tensor, sin_BT1F: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return a_BTHF * cos_BT1F - b_BTHF * sin_BT1F, b_BTHF * cos_BT1F + a_BTHF * sin_BT1F


def rope(
    q_BTHD: torch.Tensor,
    k_BTKD: torch.Tensor,
    cos_BTF: torch.Tensor,
    sin_BTF: torch.Tensor,
    q_weight_D: torch.Tensor | None,
    k_weight_D: torch.Tensor | None,
    eps: float,
    offset: float,
    all_heads: bool,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `trimtab.kernels.rope.rope`."""
    if q_weight_D is not None and k_weight_D is not None:
        if all_heads:
            q_BTHD = rms_norm(q_BTHD.flatten(-2), q_weight_D, eps, offset=offset).view(q_BTHD.shape)
            k_BTKD = rms_norm(k_BTKD.flatten(-2), k_weight_D, eps, offset=offset).view(k_BTKD.shape)
        else:
            q_BTHD = rms_norm(q_BTHD, q_weight_D, eps, offset=offset)
            k_BTKD = rms_norm(k_BTKD, k_weight_D, eps, offset=offset)
    return rotate(q_BTHD, cos_BTF, sin_BTF, interleaved), rotate(k_BTKD, cos_BTF, sin_BTF, interleaved)
