"""AdamW's arithmetic on fp32 (or fp64) tensors."""

# N elements in any shape

from __future__ import annotations

import math

import torch


def moments_(
    exp_avg_N: torch.Tensor, exp_avg_sq_N: torch.Tensor, grad_N: torch.Tensor, *, beta1: float, beta2: float
) -> None:
    """m ← β₁ m + (1 − β₁) g and v ← β₂ v + (1 − β₂) g², in place."""
    exp_avg_N.lerp_(grad_N, 1 - beta1)
    exp_avg_sq_N.mul_(beta2).addcmul_(grad_N, grad_N, value=1 - beta2)


def apply_(
    weight_N: torch.Tensor,
    exp_avg_N: torch.Tensor,
    root_N: torch.Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    """w ← w − lr·wd·w − lr·m̂/(√v̂ + ε) in place; `root_N` is √v and is overwritten with the denominator.

    The order of operations is torch.optim.AdamW's.
    """
    weight_N.mul_(1 - lr * weight_decay)
    denominator_N = root_N.div_(math.sqrt(1 - beta2**step)).add_(eps)
    weight_N.addcdiv_(exp_avg_N, denominator_N, value=-lr / (1 - beta1**step))


class Snapshot:
    """A snapshot of tensors, restored where a flag on the device is true; empty without a flag.

    Example:
        >>> weight = torch.ones(2)
        >>> kept = Snapshot([weight], torch.tensor(True))
        >>> _ = weight.zero_()
        >>> kept.restore()
        >>> weight.tolist()
        [1.0, 1.0]
    """

    def __init__(self, tensors: list[torch.Tensor], skip: torch.Tensor | None) -> None:
        self.skip, self.tensors = skip, tensors
        self.before = [] if skip is None else [t.clone() for t in tensors]

    def restore(self) -> None:
        """Restores the tensors on the device, without synchronization."""
        if self.skip is not None:
            for t, before in zip(self.tensors, self.before, strict=True):
                torch.where(self.skip, before, t, out=t)
