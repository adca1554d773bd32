"""The norm in torch, as the decoder computes it; autograd has the gradients."""

# D numbers in a row

from __future__ import annotations

import torch
from torch.nn import functional as F


def rms_norm(x: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """See the door."""
    if x.dtype == weight_D.dtype:
        return F.rms_norm(x, weight_D.shape, weight_D, eps)
    return F.rms_norm(x.to(weight_D.dtype), weight_D.shape, weight_D, eps).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the door."""
    h = x + residual
    return rms_norm(h, weight_D, eps), h
