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


BY_CHUNKS = {"adamw_torch": 36, "adamw_bf16": 44}
"""Bytes an element of a chunk that torch's operations hold while bf16 weights or moments are updated."""


def scratch_bytes(
    name: str, shape: tuple[int, ...], weight_dtype: str, device: str = "cpu", impl: str = "reference"
) -> int:
    """Most bytes held for a moment while one parameter is updated, besides weight, gradient and states.

    On a GPU a piece's old weights and states are among them, since the host does not know whether the step is
    to be skipped. `impl` is the 8-bit optimizer's.

    Example:
        >>> scratch_bytes("adamw_bf16", (1024, 1024), "bf16"), scratch_bytes("adamw_torch", (1024, 1024), "fp32")
        (11534336, 0)
    """
    count = math.prod(shape)
    if name == "adamw_torch_fused" or (name == "adamw_torch" and weight_dtype == "fp32"):
        return 0
    if name == "adamw_8bit" and (count >= adamw8bit.SMALL or impl != "reference"):
        return adamw8bit.scratch_bytes(shape, device, BYTES[weight_dtype], impl)
    piece = min(count, adamw8bit.CHUNK[device])
    kept = 0 if device == "cpu" else piece * BYTES[weight_dtype] + state_bytes(name, (piece,), weight_dtype)
    return BY_CHUNKS.get(name, 44) * piece + kept
