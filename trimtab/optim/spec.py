"""Names and costs of the optimizers, in plain Python: what a plan adds up."""

from __future__ import annotations

import math

from trimtab.facts.dtypes import BYTES
from trimtab.kernels.adamw8bit import spec as adamw8bit

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adamw_bf16", "adamw_8bit")
"""Names a recipe may use for `optim`."""

SCHEDULES = ("cosine", "linear", "constant", "constant_with_warmup", "warmup_stable_decay")
"""Names a recipe may use for `lr_scheduler_type`."""


def state_bytes(name: str, shape: tuple[int, ...], weight_dtype: str) -> int:
    """Bytes that optimizer `name` keeps for one trained parameter.

    Example:
        >>> state_bytes("adamw_torch", (1024, 1024), "bf16"), state_bytes("adamw_8bit", (1024, 1024), "bf16")
        (8388608, 2129920)
    """
    count = math.prod(shape)
    if name == "adamw_torch":
        return 2 * BYTES["fp32"] * count
    if name == "adamw_torch_fused":
        return 2 * BYTES[weight_dtype] * count
    if name == "adamw_bf16":
        return 2 * BYTES["bf16"] * count
    if name == "adamw_8bit":
        small = count < adamw8bit.SMALL
        return 2 * BYTES["fp32"] * count if small else adamw8bit.state_bytes(shape)
    raise ValueError(f"no optimizer {name!r}: {', '.join(OPTIMIZERS)}")


def scratch_bytes(name: str, shape: tuple[int, ...], weight_dtype: str, device: str = "cpu") -> int:
    """Most bytes held for a moment while one parameter is updated, besides weight, gradient and states."""
    count = math.prod(shape)
    if name == "adamw_torch_fused" or (name == "adamw_torch" and weight_dtype == "fp32"):
        return 0
    if name == "adamw_8bit" and count >= adamw8bit.SMALL:
        return adamw8bit.scratch_bytes(shape, device)
    return 11 * 4 * min(count, adamw8bit.CHUNK[device])
