"""Parameters that a Triton kernel updates together, in a few launches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trimtab.optim.base import group_learning_rate

if TYPE_CHECKING:
    from trimtab.optim.adamw import AdamWBase

NamedMember = tuple[str, torch.Tensor, dict[str, Any]]
"""A parameter's name, the parameter, and its group."""


class TableGroup:
    """Parameters on one device that are updated in the same launches, and the kernel's table of them."""

    def __init__(self, table: Any, members: list[NamedMember]) -> None:
        self.table, self.members = table, members

    def step(
        self,
        optimizer: AdamWBase,
        lr: float | None,
        grad_scale: torch.Tensor | float,
        skip: torch.Tensor | None,
    ) -> None:
        """Updates parameters that have a gradient. The optimizer is an argument, not an attribute: a reference cycle
        would delay freeing GPU memory until Python's garbage collection."""
        self.table.step(
            [None if p.grad is None else gradient_of(p) for _, p, _ in self.members],
            lr=[group_learning_rate(group, lr) for _, _, group in self.members],
            weight_decay=[group["weight_decay"] for _, _, group in self.members],
            beta1=optimizer.betas[0], beta2=optimizer.betas[1], eps=optimizer.eps, step=optimizer.count,
            seed=optimizer.seed, grad_scale=grad_scale, skip=skip,
            stochastic_rounding=optimizer.stochastic_rounding,
        )  # fmt: skip


def gradient_of(param: torch.Tensor) -> torch.Tensor:
    """The parameter's gradient, which must exist and be dense."""
    assert param.grad is not None
    assert not param.grad.is_sparse, "sparse gradients are not supported"
    return param.grad
