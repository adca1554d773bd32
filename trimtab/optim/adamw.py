"""AdamW with fp32 or bf16 moments, for fp32 and bf16 weights."""

# N elements of a flattened parameter

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from trimtab.facts.dtypes import TORCH_NAMES
from trimtab.facts.errors import RecipeError
from trimtab.kernels.adamw8bit.spec import CHUNK
from trimtab.kernels.adamw8bit.update import Snapshot, apply_, moments_
from trimtab.kernels.stochastic_rounding import stochastic_round_
from trimtab.optim.base import NamedOptimizer

NamedParameters = Iterable[dict[str, Any]] | Iterable[tuple[str, torch.Tensor]]
"""`model.named_parameters()`, or groups whose `params` are such pairs."""
STREAMS = {"weight": 0, "exp_avg": 1, "exp_avg_sq": 2}


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
    """Base of AdamW and AdamW8bit: hyperparameters, and the update with unquantized moments."""

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

    def _update_in_chunks(
        self,
        name: str,
        p: torch.Tensor,
        hyper: dict[str, Any],
        grad_scale: torch.Tensor | float,
        skip: torch.Tensor | None,
    ) -> None:
        """Updates a parameter of any dtype in chunks, with fp32 arithmetic; each result is written back once."""
        weight_N, grad_N = p.view(-1), gradient_of(p).reshape(-1)
        stored = {"weight": weight_N} | {key: t.view(-1) for key, t in self.state[p].items()}
        size = CHUNK["cpu" if p.device.type == "cpu" else "cuda"]
        for start in range(0, weight_N.numel(), size):
            piece = slice(start, start + size)
            kept = Snapshot([t[piece] for t in stored.values()], skip)
            # .float() of an fp32 tensor returns the tensor itself, so that its update is in place
            values = {key: t[piece].float() for key, t in stored.items()}
            gradient = grad_N[piece].float() * grad_scale
            moments_(
                values["exp_avg"], values["exp_avg_sq"], gradient, beta1=hyper["beta1"], beta2=hyper["beta2"]
            )
            apply_(values["weight"], values["exp_avg"], values["exp_avg_sq"].sqrt(), **hyper, step=self.count)
            for key, value in values.items():
                self._write(name, key, stored[key][piece], value, start)
            kept.restore()

    def _write(self, name: str, key: str, out_N: torch.Tensor, value_N: torch.Tensor, offset: int) -> None:
        if out_N.dtype == torch.float32:
            return
        if not self.stochastic_rounding:
            out_N.copy_(value_N)
            return
        stochastic_round_(
            out_N, value_N, seed=self.seed, step=self.count,
            param_index=self.index[name], stream=STREAMS[key], offset=offset,
        )  # fmt: skip


def gradient_of(param: torch.Tensor) -> torch.Tensor:
    """The parameter's gradient, which must exist and be dense."""
    assert param.grad is not None
    assert not param.grad.is_sparse, "sparse gradients are not supported"
    return param.grad


class AdamW(AdamWBase):
    """AdamW: decoupled weight decay, moments in fp32 or bf16, arithmetic in fp32, one write-back per step.

    fp32 weights with fp32 moments use torch's fused kernel: bitwise identical to `torch.optim.AdamW(fused=True)`. bf16
    weights and bf16 moments are rounded stochastically unless `stochastic_rounding=False`. `fused=True` uses torch's
    kernel for all parameters, which requires moments in the weights' dtype (`state_dtype="weights"`) and rounds bf16 to
    nearest: at small learning rates bf16 weights then do not change.

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
    ) -> None:
        if state_dtype not in ("fp32", "bf16", "weights"):
            raise RecipeError(f"unsupported dtype of moments: {state_dtype}", "use fp32, bf16 or weights")
        self.state_dtype, self.fused = state_dtype, fused
        super().__init__(
            named_groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay,
            stochastic_rounding=stochastic_rounding, seed=seed,
        )  # fmt: skip

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
        if self.fused:
            return True
        state = self.state[param]["exp_avg"]
        return {param.dtype, gradient_of(param).dtype, state.dtype} == {torch.float32}

    def _update(
        self, group: dict[str, Any], lr: float, grad_scale: torch.Tensor | float, skip: torch.Tensor | None
    ) -> None:
        hyper = self._hyper(group, lr)
        together: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for name, p in zip(group["param_names"], group["params"], strict=True):
            if p.grad is None or p.numel() == 0:
                continue
            if self._can_use_fused(p):
                together.setdefault((p.device, p.dtype), []).append(p)
            else:
                self._update_in_chunks(name, p, hyper, grad_scale, skip)
        for params in together.values():
            self._fused(params, hyper, grad_scale, skip)
