"""The gated activation in torch; autograd computes the gradients."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def gated_activation(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """See `trimtab.kernels.gated_mlp.gated_activation`."""
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up
