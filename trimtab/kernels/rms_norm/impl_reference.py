"""The norm in torch, as the decoder computes it; autograd computes the gradients."""

# D elements per row

from __future__ import annotations

import torch
from torch.nn import functional as F


def rms_norm(x: torch.Tensor, weight_D: torch.Tensor, eps: float, offset: float) -> torch.Tensor:
    """See `trimtab.kernels.rms_norm.rms_norm`."""
    if offset:  # w + 1 has 7 bits of mantissa in bf16: the sum is computed in fp32
        wide = torch.promote_types(torch.promote_types(x.dtype, weight_D.dtype), torch.float32)
        weight_D = weight_D.to(wide) + offset
    if x.dtype == weight_D.dtype:
        return F.rms_norm(x, weight_D.shape, weight_D, eps)
    return F.rms_norm(x.to(weight_D.dtype), weight_D.shape, weight_D, eps).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight_D: torch.Tensor, eps: float, offset: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `trimtab.kernels.rms_norm.add_rms_norm`."""
    h = x + residual
    return rms_norm(h, weight_D, eps, offset), h


def norm_add(
    branch: torch.Tensor, residual: torch.Tensor, weight_D: torch.Tensor, eps: float, offset: float
) -> torch.Tensor:
    """See `trimtab.kernels.rms_norm.norm_add`."""
    return residual + rms_norm(branch, weight_D, eps, offset)


def norm_add_norm(
    branch: torch.Tensor,
    residual: torch.Tensor,
    weight_D: torch.Tensor,
    next_weight_D: torch.Tensor,
    eps: float,
    offset: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `trimtab.kernels.rms_norm.norm_add_norm`."""
    h = norm_add(branch, residual, weight_D, eps, offset)
    return rms_norm(h, next_weight_D, eps, offset), h
