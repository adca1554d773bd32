"""The step in fp64 on uncompressed moments: the ground truth of tests and benchmarks."""

from __future__ import annotations

import torch

from trimtab.kernels.adamw8bit.update import apply_, moments_


def adamw_truth(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns (weight, first moment, second moment) after one step, in fp64; does not modify its arguments.

    Example:
        >>> zero = torch.zeros(2)
        >>> w, m, v = adamw_truth(torch.ones(2), torch.ones(2), zero, zero, lr=0.1, beta1=0.9, beta2=0.999,
        ...                       eps=0.0, weight_decay=0.0, step=1)
        >>> round(w[0].item(), 9)
        0.9
    """
    weight, gradient = param.double().clone(), grad.double() * grad_scale
    first, second = exp_avg.double().clone(), exp_avg_sq.double().clone()
    moments_(first, second, gradient, beta1=beta1, beta2=beta2)
    apply_(
        weight, first, second.sqrt(), lr=lr, beta1=beta1, beta2=beta2, eps=eps,
        weight_decay=weight_decay, step=step,
    )  # fmt: skip
    return weight, first, second
