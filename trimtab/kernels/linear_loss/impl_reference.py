"""The function of the full logits, differentiated by autograd."""

# N tokens, C hidden size, V vocabulary

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F


def reference(
    hidden_NC: torch.Tensor,
    weight_VC: torch.Tensor,
    bias_V: torch.Tensor | None,
    fn: Callable[..., torch.Tensor],
    per_token: tuple[torch.Tensor, ...],
    reduction: str,
) -> torch.Tensor:
    """See `trimtab.kernels.linear_loss.linear_loss`."""
    logits_NV = F.linear(hidden_NC, weight_VC, bias_V)
    losses_N = fn(logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)), *per_token)
    return losses_N if reduction == "none" else losses_N.sum()
