"""One AdamW step with moments in fp32 or bf16: arithmetic in fp32, each result rounded once.

    g ← grad_scale · gradient
    m ← β₁ m + (1 − β₁) g       v ← β₂ v + (1 − β₂) g²
    w ← w − lr · wd · w − lr · m̂ / (√v̂ + ε)

bf16 weights and moments are rounded stochastically; the update uses the moments before they are rounded. The kernel
does the same operations as torch's GPU kernels, up to the last bit: README.md.
"""

# N elements of a flattened parameter

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def adamw_step(
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
    grad_scale: torch.Tensor | float = 1.0,
    seed: int = 0,
    param_index: int = 0,
    stochastic_rounding: bool = True,
    skip: torch.Tensor | None = None,
    impl: str = "reference",
) -> None:
    """Updates `param` and its moments (fp32 or bf16, contiguous) in place from `grad` (any float dtype, strides).

    `step` counts from 1. `grad_scale` multiplies the gradient and may be a 0-dim tensor on the device, without
    synchronization. `seed`, `step` and `param_index` determine the random bits; `stochastic_rounding=False` rounds to
    nearest. If `skip`, a 0-dim bool tensor on the device, is true, nothing changes. `impl="triton"` may differ
    from "reference" in the last bit; both are deterministic. `table.ParameterTable` updates many tensors in one launch.

    Example:
        >>> import torch
        >>> w, m, v = torch.ones(3), torch.zeros(3), torch.zeros(3)
        >>> adamw_step(w, torch.ones(3), m, v, lr=0.1, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, step=1)
        >>> round(w[0].item(), 4)
        0.9
    """
    hyper: dict[str, Any] = {
        "beta1": beta1,
        "beta2": beta2,
        "eps": eps,
        "step": step,
        "grad_scale": grad_scale,
    }
    hyper |= {"seed": seed, "stochastic_rounding": stochastic_rounding, "skip": skip}
    if impl == "reference":
        from trimtab.kernels.adamw import impl_reference

        impl_reference.adamw_step(
            param, grad, exp_avg, exp_avg_sq,
            lr=lr, weight_decay=weight_decay, param_index=param_index, **hyper,
        )  # fmt: skip
    elif impl == "triton":
        from trimtab.kernels.adamw.table import Member, ParameterTable

        if param.numel():
            table = ParameterTable([Member(param, exp_avg, exp_avg_sq, param_index)])
            table.step([grad], lr=[lr], weight_decay=[weight_decay], **hyper)
    else:
        raise ValueError(f"adamw has no impl {impl!r}: reference or triton")
