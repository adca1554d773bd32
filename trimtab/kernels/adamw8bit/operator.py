"""The step of one tensor as a torch operator that mutates its arguments."""

from __future__ import annotations

import torch

from trimtab.kernels.adamw8bit import State8bit
from trimtab.kernels.adamw8bit.table import Member, ParameterTable

torch.library.define(
    "trimtab::adamw8bit_step_",
    "(Tensor(a!) param, Tensor grad, Tensor(b!) codes1, Tensor(c!) scale1, Tensor(d!) codes2, Tensor(e!) scale2, "
    "Tensor grad_scale, Tensor? skip, float lr, float beta1, float beta2, float eps, float weight_decay, int step, "
    "int seed, int param_index, bool stochastic_rounding, int offset, bool exact) -> ()",
)


def _step(
    param: torch.Tensor,
    grad: torch.Tensor,
    codes1: torch.Tensor,
    scale1: torch.Tensor,
    codes2: torch.Tensor,
    scale2: torch.Tensor,
    grad_scale: torch.Tensor,
    skip: torch.Tensor | None,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    seed: int,
    param_index: int,
    stochastic_rounding: bool,
    offset: int,
    exact: bool,
) -> None:
    if param.numel() == 0:
        return
    member = Member(param, State8bit(codes1, scale1, codes2, scale2), param_index, offset)
    ParameterTable([member], exact).step(
        [grad], lr=[lr], weight_decay=[weight_decay], beta1=beta1, beta2=beta2, eps=eps, step=step, seed=seed,
        grad_scale=grad_scale, skip=skip, stochastic_rounding=stochastic_rounding,
    )  # fmt: skip


torch.library.impl("trimtab::adamw8bit_step_", ("cpu", "cuda"), _step)


@torch.library.register_fake("trimtab::adamw8bit_step_")
def _fake(*arguments: object) -> None:
    """Returns nothing; mutated arguments keep their shapes."""


step_ = torch.ops.trimtab.adamw8bit_step_
