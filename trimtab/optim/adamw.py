"""AdamW with fp32 or bf16 moments, for fp32 and bf16 weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from trimtab.facts.dtypes import TORCH_NAMES
from trimtab.facts.errors import RecipeError
from trimtab.kernels.adamw import adamw_step
from trimtab.optim.base import NamedOptimizer
from trimtab.optim.tables import NamedMember, TableGroup, gradient_of

NamedParameters = Iterable[dict[str, Any]] | Iterable[tuple[str, torch.Tensor]]
"""`model.named_parameters()`, or groups whose `params` are such pairs."""
IMPLS = ("torch", "triton")
"""Implementations of AdamW with fp32 or bf16 moments."""


def as_groups(named: NamedParameters) -> list[dict[str, Any]]:
    """Converts named parameters to groups; raises for unnamed ones, since states are keyed by name.

    Example:
        >>> as_groups(torch.nn.Linear(2, 2, bias=False).named_parameters())[0]["params"][0][0]
        'weight'
    """
    members: list[Any] = list(named)
    if not members or isinstance(members[0], dict):
        return members
    if not isinstance(members[0], tuple):
        raise RecipeError(
            f"the optimizer needs parameter names, but got a {type(members[0]).__name__} without a name",
            "pass model.named_parameters()",
        )
    return [{"params": members}]


class AdamWBase(NamedOptimizer):
    """Base of AdamW and AdamW8bit: hyperparameters, torch's fused kernel, and launches for many parameters."""

    def __init__(
        self,
        named_groups: NamedParameters,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        stochastic_rounding: bool,
        seed: int,
    ) -> None:
        for value, name in ((betas[0], "adam_beta1"), (betas[1], "adam_beta2")):
            if not 0.0 <= value < 1.0:
                raise RecipeError(f"{name} is {value}", "give a number from 0 to below 1")
        if lr < 0 or eps < 0 or weight_decay < 0:
            raise RecipeError("learning rate, epsilon and weight decay cannot be negative", "give 0 or more")
        self.betas, self.eps, self.stochastic_rounding = betas, eps, stochastic_rounding
        groups = [{"weight_decay": weight_decay, **group} for group in as_groups(named_groups)]
        super().__init__(groups, lr=lr, seed=seed)
        devices = {p.device for _, p, _ in self._named()}
        self._steps = {device: torch.zeros((), device=device) for device in devices}
        self._tables: list[TableGroup] = []
        self._in_tables: dict[str, NamedMember] = {}
        self._alone: dict[str, TableGroup] = {}

    def _new_table(self, members: list[NamedMember]) -> Any:
        """Builds the kernel's table of parameters on one device."""
        raise NotImplementedError

    def _use_tables(self, members: list[NamedMember]) -> None:
        """Updates these parameters in a few launches per device, instead of one by one."""
        devices: dict[torch.device, list[NamedMember]] = {}
        for name, p, group in members:
            if p.numel():
                self._in_tables[name] = (name, p, group)
                devices.setdefault(p.device, []).append((name, p, group))
        self._tables = [TableGroup(self._new_table(together), together) for together in devices.values()]

    def _update_all(
        self, lr: float | None, grad_scale: torch.Tensor | float, skip: torch.Tensor | None
    ) -> None:
        super()._update_all(lr, grad_scale, skip)
        for together in self._tables:
            together.step(self, lr, grad_scale, skip)

    def _update_one(
        self,
        name: str,
        param: torch.Tensor,
        group: dict[str, Any],
        lr: float | None,
        grad_scale: torch.Tensor | float,
        skip: torch.Tensor | None,
    ) -> None:
        if name not in self._in_tables:
            super()._update_one(name, param, group, lr, grad_scale, skip)
            return
        if name not in self._alone:
            members = [self._in_tables[name]]
            self._alone[name] = TableGroup(self._new_table(members), members)
        self._alone[name].step(self, lr, grad_scale, skip)

    def _hyper(self, group: dict[str, Any], lr: float) -> dict[str, Any]:
        decay = group["weight_decay"]
        return {
            "lr": lr,
            "beta1": self.betas[0],
            "beta2": self.betas[1],
            "eps": self.eps,
            "weight_decay": decay,
        }

    def _fused(
        self,
        params: list[torch.Tensor],
        hyper: dict[str, Any],
        grad_scale: torch.Tensor | float,
        skip: torch.Tensor | None,
    ) -> None:
        """Runs torch's fused kernel (CPU, CUDA) on tensors of one device and dtype."""
        device = params[0].device
        divisor = None
        if isinstance(grad_scale, torch.Tensor):
            divisor = grad_scale.to(device, torch.float32, non_blocking=True).reciprocal()
        elif grad_scale != 1.0:
            divisor = torch.full((), 1.0 / grad_scale, device=device)
        steps = self._steps[device].fill_(self.count)
        torch._fused_adamw_(
            params,
            [gradient_of(p).to(p.dtype).contiguous() for p in params],
            [self.state[p]["exp_avg"] for p in params],
            [self.state[p]["exp_avg_sq"] for p in params],
            [],
            [steps] * len(params),
            **hyper,
            amsgrad=False,
            maximize=False,
            grad_scale=divisor,
            found_inf=None if skip is None else skip.float(),
        )


class AdamW(AdamWBase):
    """AdamW: decoupled weight decay, moments in fp32 or bf16, arithmetic in fp32, one write-back per step.

    fp32 weights with fp32 moments use torch's fused kernel: bitwise identical to `torch.optim.AdamW(fused=True)`. bf16
    weights and bf16 moments are rounded stochastically unless `stochastic_rounding=False`. `fused=True` uses torch's
    kernel for all parameters, which requires moments in the weights' dtype (`state_dtype="weights"`) and rounds bf16 to
    nearest: at small learning rates bf16 weights then do not change.

    `impl` is "torch" (any device: parameters other than fp32 ones are updated one by one, in chunks) or "triton" (CUDA:
    those are updated in one launch per combination of dtypes). Both do the same operations in fp32; torch's may be
    fused differently, so that results may differ in the last bit.

    Example:
        >>> layer = torch.nn.Linear(2, 1, dtype=torch.bfloat16)
        >>> optimizer = AdamW([{"params": list(layer.named_parameters())}], lr=2e-5)
        >>> layer(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step(lr=1e-5, grad_scale=0.5)
        >>> sorted(optimizer.tensors())
        ['exp_avg.bias', 'exp_avg.weight', 'exp_avg_sq.bias', 'exp_avg_sq.weight']
    """

    def __init__(
        self,
        named_groups: NamedParameters,
        *,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        state_dtype: str = "fp32",
        stochastic_rounding: bool = True,
        seed: int = 0,
        fused: bool = False,
        impl: str = "torch",
    ) -> None:
        if impl not in IMPLS:
            raise ValueError(f"unknown AdamW implementation {impl!r}; use one of {', '.join(IMPLS)}")
        if state_dtype not in ("fp32", "bf16", "weights"):
            raise RecipeError(f"unsupported dtype of moments: {state_dtype}", "use fp32, bf16 or weights")
        self.state_dtype, self.fused = state_dtype, fused
        super().__init__(
            named_groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay,
            stochastic_rounding=stochastic_rounding, seed=seed,
        )  # fmt: skip
        if impl == "triton" and not fused:
            self._use_tables([member for member in self._named() if not self._is_fp32(member[1])])

    def _is_fp32(self, param: torch.Tensor) -> bool:
        return {param.dtype, self.state[param]["exp_avg"].dtype} == {torch.float32}

    def _new_table(self, members: list[NamedMember]) -> Any:
        from trimtab.kernels.adamw.table import Member, ParameterTable

        states = [self.state[p] for _, p, _ in members]
        return ParameterTable(
            [
                Member(p, state["exp_avg"], state["exp_avg_sq"], self.index[name])
                for (name, p, _), state in zip(members, states, strict=True)
            ]
        )

    def _new_state(self, name: str, param: torch.Tensor) -> dict[str, torch.Tensor]:
        dtype = (
            param.dtype if self.state_dtype == "weights" else getattr(torch, TORCH_NAMES[self.state_dtype])
        )
        if self.fused and dtype != param.dtype:
            raise RecipeError(
                f"torch's fused kernel does not support {dtype} moments of {name}, which is {param.dtype}",
                "use state_dtype='weights', or adamw_torch",
            )
        return {key: torch.zeros_like(param, dtype=dtype) for key in ("exp_avg", "exp_avg_sq")}

    def _can_use_fused(self, param: torch.Tensor) -> bool:
        return self.fused or (self._is_fp32(param) and gradient_of(param).dtype == torch.float32)

    def _update(
        self, group: dict[str, Any], lr: float, grad_scale: torch.Tensor | float, skip: torch.Tensor | None
    ) -> None:
        hyper = self._hyper(group, lr)
        together: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for name, p in zip(group["param_names"], group["params"], strict=True):
            if name in self._in_tables or p.grad is None or p.numel() == 0:
                continue
            if self._can_use_fused(p):
                together.setdefault((p.device, p.dtype), []).append(p)
                continue
            state = self.state[p]
            adamw_step(
                p, gradient_of(p), state["exp_avg"], state["exp_avg_sq"], **hyper, step=self.count,
                grad_scale=grad_scale, seed=self.seed, param_index=self.index[name],
                stochastic_rounding=self.stochastic_rounding, skip=skip,
            )  # fmt: skip
        for params in together.values():
            self._fused(params, hyper, grad_scale, skip)
