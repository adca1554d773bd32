"""Runs the optimizer step in the backward pass: each gradient is applied and freed as soon as it is complete.

The gradients of a step are never all allocated, which saves as much memory as the weights take (twice that with fp32
gradients of bf16 weights). Features that need all gradients are not possible: clipping by the global norm, and gradient
accumulation.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trimtab.facts.errors import TrainingError
from trimtab.optim.base import NamedOptimizer
from trimtab.optim.clip import global_norm


class OptimizerInBackward:
    """Makes `optimizer` update every parameter during `backward()`, as long as this object is alive; call `begin`
    before each backward.

    A weight is updated when its gradient is complete, which is after its last use in the backward pass: so the backward
    pass reads only old weights.

    Example:
        >>> layer = torch.nn.Linear(4, 4)
        >>> steps = OptimizerInBackward(AdamW([{"params": list(layer.named_parameters())}], lr=0.1))  # doctest: +SKIP
        >>> steps.begin(lr=0.1)  # doctest: +SKIP
        >>> layer(torch.ones(1, 4)).sum().backward()  # doctest: +SKIP
        >>> layer.weight.grad is None  # doctest: +SKIP
        True
    """

    def __init__(self, optimizer: NamedOptimizer) -> None:
        self.optimizer = optimizer
        self.now: dict[str, Any] | None = None
        self.norms: dict[str, torch.Tensor] = {}
        self.active = True
        self.groups = {name: group for name, _, group in optimizer._named()}
        self.hooks = [
            p.register_post_accumulate_grad_hook(_hook(weakref.ref(self), name))
            for name, p, _ in optimizer._named()
        ]

    def begin(
        self,
        *,
        lr: float | None = None,
        grad_scale: torch.Tensor | float = 1.0,
        skip: torch.Tensor | None = None,
    ) -> None:
        """Starts a step: the next backward applies it. Arguments as in `optimizer.step`."""
        self.optimizer.count += 1
        self.norms = {}
        self.now = {"lr": lr, "grad_scale": grad_scale, "skip": skip}

    def norm(self) -> torch.Tensor:
        """√Σ g² over the gradients of the last step, a 0-dim fp32 tensor on their device."""
        if not self.norms:
            return torch.zeros(())
        return torch.linalg.vector_norm(torch.stack(list(self.norms.values())))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Gradients are not applied inside this context."""
        self.active = False
        try:
            yield
        finally:
            self.active = True

    def _apply_gradient(self, name: str, param: torch.Tensor) -> None:
        if not self.active:
            return
        if self.now is None or name in self.norms:
            raise TrainingError(
                f"{name} received a second gradient in one step",
                "call begin() before every backward(); an optimizer in the backward pass does not support gradient "
                "accumulation",
            )
        self._update(name, param, self.now)
        param.grad = None

    @torch.no_grad()
    def _update(self, name: str, param: torch.Tensor, now: dict[str, Any]) -> None:
        """Updates a weight if its gradient is finite; other weights may have been updated already."""
        norm = global_norm([param]).to(param.device)
        self.norms[name] = norm
        # NaN unless the norm is finite: two launches, where `~isfinite()` takes five
        skip: torch.Tensor | None = (norm - norm) != 0
        skip = skip if now["skip"] is None else now["skip"] | skip
        if param.device.type == "cpu":
            if bool(skip):
                return
            skip = None
        self.optimizer._update_one(name, param, self.groups[name], now["lr"], now["grad_scale"], skip)

    def close(self) -> None:
        """Removes the hooks; the optimizer uses `step()` again."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = []


def _hook(steps: weakref.ref[OptimizerInBackward], name: str) -> Any:
    """Returns the hook that runs when a gradient is complete. Autograd's reference to it is invisible to the garbage
    collector: a strong reference to the optimizer would keep all weights alive forever."""

    def update(param: torch.Tensor) -> None:
        optimizer = steps()
        if optimizer is not None:
            optimizer._apply_gradient(name, param)

    return update
