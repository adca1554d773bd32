"""The full [N, V] logits, softmax in fp32: the definition that every other implementation is tested against."""

# N tokens, C hidden size, V vocabulary

from __future__ import annotations

import torch
import torch.nn.functional as F

from trimtab.kernels.linear_cross_entropy.objective import Objective


def reference(
    hidden_NC: torch.Tensor,
    weight_VC: torch.Tensor,
    bias_V: torch.Tensor | None,
    labels_N: torch.Tensor,
    weights_N: torch.Tensor | None,
    objective: Objective,
    *,
    ignore_index: int,
) -> torch.Tensor:
    """weight · loss per token, 0 where ignored. See `linear_cross_entropy`."""
    logits_NV = F.linear(hidden_NC, weight_VC, bias_V)
    logits_NV = logits_NV.to(
        torch.promote_types(logits_NV.dtype, torch.float32)
    )  # fp64 stays fp64, for tests
    if objective.softcap:
        logits_NV = objective.softcap * torch.tanh(logits_NV / objective.softcap)
    losses_N = F.cross_entropy(
        logits_NV,
        labels_N,
        ignore_index=ignore_index,
        reduction="none",
        label_smoothing=objective.label_smoothing,
    )
    if objective.z_loss:
        squares_N = torch.logsumexp(logits_NV, -1).square()
        losses_N = losses_N + objective.z_loss * torch.where(labels_N != ignore_index, squares_N, 0.0)
    return losses_N if weights_N is None else losses_N * weights_N
