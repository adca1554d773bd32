"""The whole [N, V] matrix of logits, softmax in fp32: what every other implementation must equal."""

# N tokens, C hidden size, V vocabulary

from __future__ import annotations

import torch
import torch.nn.functional as F


def reference(
    hidden_NC: torch.Tensor,
    weight_VC: torch.Tensor,
    bias_V: torch.Tensor | None,
    labels_N: torch.Tensor,
    ignore_index: int,
    reduction: str,
) -> torch.Tensor:
    """See `trimtab.kernels.linear_cross_entropy.linear_cross_entropy`."""
    logits_NV = F.linear(hidden_NC, weight_VC, bias_V)
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))  # fp64 stays: tests' truth
    losses_N = F.cross_entropy(logits_NV, labels_N, ignore_index=ignore_index, reduction="none")
    if reduction == "none":
        return losses_N
    if reduction == "sum":
        return losses_N.sum()
    return losses_N.sum() / (labels_N != ignore_index).sum().clamp(min=1)
