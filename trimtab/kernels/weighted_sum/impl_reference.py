"""The weighted sum in torch: the definition that the kernel is tested against. Autograd computes the gradients."""

# N rows, D elements per row

from __future__ import annotations

import torch


def reference(x_ND: torch.Tensor, w_D: torch.Tensor) -> torch.Tensor:
    """See `trimtab.kernels.weighted_sum.weighted_sum`."""
    wide = torch.promote_types(x_ND.dtype, torch.float32)
    return (x_ND.to(wide) * w_D.to(wide)).sum(-1).to(x_ND.dtype)
