"""The weighted sum in torch: what the kernel must do, in the fewest words; autograd has the gradients."""

# N rows, D numbers in a row

from __future__ import annotations

import torch


def reference(x_ND: torch.Tensor, w_D: torch.Tensor) -> torch.Tensor:
    """See the door."""
    wide = torch.promote_types(x_ND.dtype, torch.float32)
    return (x_ND.to(wide) * w_D.to(wide)).sum(-1).to(x_ND.dtype)
