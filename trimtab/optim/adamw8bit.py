"""AdamW whose moments take one byte each."""

from __future__ import annotations

from typing import Any

import torch

from trimtab.kernels.adamw8bit import State8bit, adamw8bit_step, new_state
from trimtab.kernels.adamw8bit.spec import SMALL
from trimtab.optim.adamw import AdamWBase, gradient_of

KEYS = ("exp_avg_codes", "exp_avg_scale", "root_codes", "root_scale")
"""States of a compressed parameter, in State8bit's order; "root" is the square root of the second moment."""


class AdamW8bit(AdamWBase):
    """AdamW with 8-bit moments in blocks of 256: about 2 bytes a parameter instead of 8.

    Tensors of fewer than 4096 elements keep fp32 moments. The layout and the code are described in
    `trimtab.kernels.adamw8bit`.

    Example:
        >>> layer = torch.nn.Linear(64, 64)
        >>> optimizer = AdamW8bit([{"params": list(layer.named_parameters())}], lr=1e-3)
        >>> {name: tuple(t.shape) for name, t in optimizer.tensors().items() if name.startswith("root")}
        {'root_codes.weight': (64, 64), 'root_scale.weight': (64, 1)}
    """

    def __init__(
        self,
        named_groups: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        stochastic_rounding: bool = True,
        seed: int = 0,
        impl: str = "reference",
    ) -> None:
        self.impl = impl
        super().__init__(
            named_groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay,
            stochastic_rounding=stochastic_rounding, seed=seed,
        )  # fmt: skip

    def _new_state(self, name: str, param: torch.Tensor) -> dict[str, torch.Tensor]:
        if param.numel() < SMALL:
            return {key: torch.zeros_like(param, dtype=torch.float32) for key in ("exp_avg", "exp_avg_sq")}
        return dict(zip(KEYS, new_state(param), strict=True))

    def _update(
        self, group: dict[str, Any], lr: float, grad_scale: torch.Tensor | float, skip: torch.Tensor | None
    ) -> None:
        hyper = self._hyper(group, lr)
        for name, p in zip(group["param_names"], group["params"], strict=True):
            if p.grad is None or p.numel() == 0:
                continue
            if "exp_avg" in self.state[p]:
                self._by_chunks(name, p, hyper, grad_scale, skip)
                continue
            adamw8bit_step(
                p, gradient_of(p), State8bit(*(self.state[p][key] for key in KEYS)),
                **hyper, step=self.count, grad_scale=grad_scale, seed=self.seed, param_index=self.index[name],
                stochastic_rounding=self.stochastic_rounding, skip=skip, impl=self.impl,
            )  # fmt: skip
