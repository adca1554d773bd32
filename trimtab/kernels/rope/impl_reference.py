"""Rotary positions in torch, as the decoder computes them; autograd has the gradients."""

# B batch, T tokens, H query heads, K key heads, D head size, F = D / 2 frequencies

from __future__ import annotations

import torch

from trimtab.kernels.rms_norm import rms_norm


def rotate(x_BTHD: torch.Tensor, cos_BTF: torch.Tensor, sin_BTF: torch.Tensor) -> torch.Tensor:
    """x with its halves turned by the positions' angles, in the cosines' dtype, rounded once."""
    cos_BT1F, sin_BT1F = cos_BTF[:, :, None], sin_BTF[:, :, None]
    a_BTHF, b_BTHF = x_BTHD.to(cos_BTF.dtype).chunk(2, dim=-1)
    out_BTHD = torch.cat(
        (a_BTHF * cos_BT1F - b_BTHF * sin_BT1F, b_BTHF * cos_BT1F + a_BTHF * sin_BT1F), dim=-1
    )
    return out_BTHD.to(x_BTHD.dtype)


def rope(
    q_BTHD: torch.Tensor,
    k_BTKD: torch.Tensor,
    cos_BTF: torch.Tensor,
    sin_BTF: torch.Tensor,
    q_weight_D: torch.Tensor | None,
    k_weight_D: torch.Tensor | None,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the door."""
    if q_weight_D is not None and k_weight_D is not None:
        q_BTHD, k_BTKD = rms_norm(q_BTHD, q_weight_D, eps), rms_norm(k_BTKD, k_weight_D, eps)
    return rotate(q_BTHD, cos_BTF, sin_BTF), rotate(k_BTKD, cos_BTF, sin_BTF)
