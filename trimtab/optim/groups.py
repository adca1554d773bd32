"""Parameter groups: with and without weight decay, and with separate learning rates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch


def parameter_groups(
    named_parameters: Iterable[tuple[str, torch.Tensor]],
    weight_decay: float,
    decay_all: bool = False,
    lr_scales: Mapping[str, float] | None = None,
) -> list[dict[str, Any]]:
    """Groups the named trainable parameters for an optimizer, with and without weight decay.

    As in Hugging Face's Trainer, matrices (including embeddings) have weight decay; norms and biases (`ndim < 2`) do
    not. `decay_all=True` decays everything. Frozen parameters are excluded. `lr_scales` maps parameter names to factors
    on the learning rate.

    Example:
        >>> groups = parameter_groups(torch.nn.Linear(2, 2).named_parameters(), 0.1)
        >>> [([name for name, _ in g["params"]], g["weight_decay"]) for g in groups]
        [(['weight'], 0.1), (['bias'], 0.0)]
    """
    scales = lr_scales or {}
    kinds: dict[tuple[bool, float], list[tuple[str, torch.Tensor]]] = {(True, 1.0): [], (False, 1.0): []}
    for name, p in named_parameters:
        if p.requires_grad:
            kinds.setdefault((decay_all or p.ndim >= 2, scales.get(name, 1.0)), []).append((name, p))
    return [
        {"params": members, "weight_decay": weight_decay if decayed else 0.0}
        | ({} if scale == 1.0 else {"lr_scale": scale})
        for (decayed, scale), members in kinds.items()
        if members
    ]
