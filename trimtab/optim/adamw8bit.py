"""AdamW with 8-bit moments."""

from __future__ import annotations

from typing import Any

import torch

from trimtab.kernels.adamw8bit import State8bit, adamw8bit_step, new_state
from trimtab.kernels.adamw8bit.spec import IMPLS, MIN_8BIT_SIZE
from trimtab.optim.adamw import AdamWBase, NamedParameters
from trimtab.optim.tables import NamedMember, gradient_of

KEYS = ("exp_avg_codes", "exp_avg_scale", "root_codes", "root_scale")
"""Names of a parameter's 8-bit states, in State8bit's order; "root" is the square root of the second moment."""


class AdamW8bit(AdamWBase):
    """AdamW with 8-bit moments in blocks of 256: about 2 bytes per parameter instead of 8.

    Tensors of fewer than 4096 elements have fp32 moments. The layout and the quantization maps are described in
    `trimtab.kernels.adamw8bit`. `impl` is "reference" (torch, any device), "triton" (CUDA: all parameters in a few
    launches) or "triton_exact" (slower, and bitwise identical to the reference). All have the same states, so that a
    run may continue with another implementation.

    Example:
        >>> layer = torch.nn.Linear(64, 64)
        >>> optimizer = AdamW8bit(layer.named_parameters(), lr=1e-3)
        >>> {name: tuple(t.shape) for name, t in optimizer.tensors().items() if name.startswith("root")}
        {'root_codes.weight': (64, 64), 'root_scale.weight': (64, 1)}
    """

    def __init__(
        self,
        named_groups: NamedParameters,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        stochastic_rounding: bool = True,
        seed: int = 0,
        impl: str = "reference",
    ) -> None:
        if impl not in IMPLS:
            raise ValueError(f"unknown AdamW8bit implementation {impl!r}; use one of {', '.join(IMPLS)}")
        self.impl = impl
        super().__init__(
            named_groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay,
            stochastic_rounding=stochastic_rounding, seed=seed,
        )  # fmt: skip
        if impl != "reference":
            self._use_tables(list(self._named()))

    def _new_state(self, name: str, param: torch.Tensor) -> dict[str, torch.Tensor]:
        if param.numel() < MIN_8BIT_SIZE:
            return {key: torch.zeros_like(param, dtype=torch.float32) for key in ("exp_avg", "exp_avg_sq")}
        return dict(zip(KEYS, new_state(param), strict=True))

    def _new_table(self, members: list[NamedMember]) -> Any:
        from trimtab.kernels.adamw8bit.table import Member, ParameterTable

        states = [self.state[p] for _, p, _ in members]
        return ParameterTable(
            [
                Member(
                    p,
                    (s["exp_avg"], s["exp_avg_sq"])
                    if "exp_avg" in s
                    else State8bit(*(s[key] for key in KEYS)),
                    self.index[name],
                )
                for (name, p, _), s in zip(members, states, strict=True)
            ],
            exact=self.impl == "triton_exact",
        )

    def _update(
        self, group: dict[str, Any], lr: float, grad_scale: torch.Tensor | float, skip: torch.Tensor | None
    ) -> None:
        from trimtab.kernels.adamw8bit.impl_reference import fp32_step

        for name, p in zip(group["param_names"], group["params"], strict=True):
            if name in self._in_tables or p.grad is None or p.numel() == 0:
                continue
            hyper = self._hyper(group, lr) | {
                "step": self.count, "grad_scale": grad_scale, "seed": self.seed,
                "param_index": self.index[name], "stochastic_rounding": self.stochastic_rounding, "skip": skip,
            }  # fmt: skip
            state = self.state[p]
            if "exp_avg" in state:
                fp32_step(p, gradient_of(p), (state["exp_avg"], state["exp_avg_sq"]), **hyper)
            else:
                adamw8bit_step(p, gradient_of(p), State8bit(*(state[key] for key in KEYS)), **hyper)
