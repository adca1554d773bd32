"""Which parameters are decayed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def parameter_groups(
    named_parameters: Iterable[tuple[str, torch.Tensor]], weight_decay: float, decay_all: bool = False
) -> list[dict[str, Any]]:
    """Groups for an optimizer: trained parameters with their names, with and without decay.

    Hugging Face's convention: matrices (embeddings too) are decayed, norms and biases are not. They are told
    apart by dimensions, `ndim < 2`. `decay_all=True` decays everything. Frozen parameters are left out.

    Example:
        >>> groups = parameter_groups(torch.nn.Linear(2, 2).named_parameters(), 0.1)
        >>> [([name for name, _ in g["params"]], g["weight_decay"]) for g in groups]
        [(['weight'], 0.1), (['bias'], 0.0)]
    """
    trained = [(name, p) for name, p in named_parameters if p.requires_grad]
    decayed = [(name, p) for name, p in trained if decay_all or p.ndim >= 2]
    spared = [(name, p) for name, p in trained if not (decay_all or p.ndim >= 2)]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": spared, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
