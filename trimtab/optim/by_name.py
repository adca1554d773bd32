"""Builds an optimizer by its name in a recipe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from trimtab.facts.errors import RecipeError
from trimtab.optim.adamw import AdamW
from trimtab.optim.adamw8bit import AdamW8bit
from trimtab.optim.base import NamedOptimizer
from trimtab.optim.groups import parameter_groups
from trimtab.optim.spec import OPTIMIZERS


def build(
    name: str,
    named_parameters: Iterable[tuple[str, torch.Tensor]],
    *,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decay_all: bool = False,
    seed: int = 0,
    impl: str = "reference",
    lr_scales: Mapping[str, float] | None = None,
) -> NamedOptimizer:
    """Builds the optimizer `name` for the trainable parameters, grouped as in Hugging Face's Trainer.

    `impl` is the implementation: "reference", "triton" or "triton_exact" of the 8-bit optimizer; "triton" of
    adamw_torch and adamw_bf16, which use torch's operations otherwise. `lr_scales` maps parameter names to factors on
    the learning rate.

    Example:
        >>> optimizer = build("adamw_8bit", torch.nn.Linear(64, 64).named_parameters(), lr=1e-3)
        >>> type(optimizer).__name__, len(optimizer.param_groups)
        ('AdamW8bit', 2)
    """
    groups = parameter_groups(named_parameters, weight_decay, decay_all, lr_scales)
    floating = "triton" if impl == "triton" else "torch"
    if name == "adamw_torch":
        return AdamW(groups, lr=lr, betas=betas, eps=eps, seed=seed, impl=floating)
    if name == "adamw_torch_fused":
        return AdamW(groups, lr=lr, betas=betas, eps=eps, seed=seed, state_dtype="weights", fused=True)
    if name == "adamw_bf16":
        return AdamW(groups, lr=lr, betas=betas, eps=eps, seed=seed, state_dtype="bf16", impl=floating)
    if name == "adamw_8bit":
        return AdamW8bit(groups, lr=lr, betas=betas, eps=eps, seed=seed, impl=impl)
    raise RecipeError(f"unknown optimizer {name!r}", f"choose one of {', '.join(OPTIMIZERS)}")
