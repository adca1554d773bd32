"""Selects the implementation of an optimizer for a run, with the reason. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterable

from trimtab.kernels.adamw.choice import choose_adamw
from trimtab.kernels.adamw8bit.choice import choose_adamw8bit
from trimtab.kernels.choice import ImplChoice


def choose_optimizer(
    name: str, weight_dtypes: Iterable[str], *, device: str, triton: bool = True, requested: str = "auto"
) -> ImplChoice:
    """Selects the implementation of the optimizer `name`.

    Args:
        name: the recipe's `optim`.
        weight_dtypes: dtypes of the trained parameters.
        device: cpu or cuda.
        triton: whether Triton runs on the device.
        requested: the recipe's `optim_implementation`, for adamw_8bit.

    Example:
        >>> choose_optimizer("adamw_torch", ["bf16"], device="cuda").impl
        'triton'
        >>> choose_optimizer("adamw_torch", ["fp32"], device="cuda").reason
        "torch's fused kernel"
    """
    if name == "adamw_8bit":
        return choose_adamw8bit(device=device, triton=triton, requested=requested)
    fused = name == "adamw_torch_fused" or (name == "adamw_torch" and set(weight_dtypes) == {"fp32"})
    return choose_adamw(device=device, triton=triton, fused=fused)
