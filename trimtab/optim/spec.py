"""Names and costs of the optimizers, for plans. Does not import torch."""

from __future__ import annotations

import math

from trimtab.facts.dtypes import BYTES
from trimtab.kernels.adamw import spec as adamw
from trimtab.kernels.adamw8bit import spec as adamw8bit

OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "adamw_bf16", "adamw_8bit")
"""Valid values of the recipe's `optim`."""

SCHEDULES = ("cosine", "linear", "constant", "constant_with_warmup", "warmup_stable_decay")
"""Valid values of the recipe's `lr_scheduler_type`."""


def state_bytes(name: str, shape: tuple[int, ...], weight_dtype: str) -> int:
    """Bytes of optimizer state of one trainable parameter.

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
        small = count < adamw8bit.MIN_8BIT_SIZE
        return 2 * BYTES["fp32"] * count if small else adamw8bit.state_bytes(shape)
    raise ValueError(f"unknown optimizer {name!r}; use one of {', '.join(OPTIMIZERS)}")


def bytes_moved(name: str, shape: tuple[int, ...], weight_dtype: str, gradient_dtype: str) -> int:
    """Bytes moved by one update, as a lower bound: weight and states read and written, gradient read.

    Example:
        >>> bytes_moved("adamw_torch", (1024, 1024), "fp32", "fp32") / 1024**2
        28.0
    """
    own = math.prod(shape) * (2 * BYTES[weight_dtype] + BYTES[gradient_dtype])
    return own + 2 * state_bytes(name, shape, weight_dtype)


MOMENTS = {"adamw_torch": "fp32", "adamw_bf16": "bf16"}
"""Dtype of the moments, where it does not depend on the weights."""

BY_CHUNKS = {name: adamw.REFERENCE_BYTES[BYTES[dtype]] for name, dtype in MOMENTS.items()}
"""Temporary bytes per element of a chunk while torch operations update bf16 weights or moments."""


def scratch_bytes(
    name: str, shape: tuple[int, ...], weight_dtype: str, device: str = "cpu", impl: str = "reference"
) -> int:
    """Peak temporary bytes while one parameter is updated, in addition to weight, gradient and states, and to the
    gradient's copy (`gradient_copy_bytes`).

    On a GPU torch's operations include a snapshot of a chunk's weights and states, since the host does not read whether
    the step is skipped; Triton's kernels allocate nothing. `impl` is the optimizer's implementation.

    Example:
        >>> scratch_bytes("adamw_bf16", (1024, 1024), "bf16"), scratch_bytes("adamw_torch", (1024, 1024), "fp32")
        (11534336, 0)
        >>> scratch_bytes("adamw_bf16", (1024, 1024), "bf16", "cuda", impl="triton")
        0
    """
    count = math.prod(shape)
    if name == "adamw_torch_fused" or (name == "adamw_torch" and weight_dtype == "fp32"):
        return 0
    width = BYTES[weight_dtype]
    if name in MOMENTS:
        return adamw.scratch_bytes(
            count, device, weight_bytes=width, moment_bytes=BYTES[MOMENTS[name]], impl=impl
        )
    if count >= adamw8bit.MIN_8BIT_SIZE or impl != "reference":
        return adamw8bit.scratch_bytes(shape, device, width, impl)
    return 44 * count + (0 if device == "cpu" else count * (width + 2 * BYTES["fp32"]))


def gradient_copy_bytes(name: str, shape: tuple[int, ...], weight_dtype: str, gradient_dtype: str) -> int:
    """Bytes of a gradient's copy in the weight's dtype, which torch's fused kernel needs; 0 without a copy.

    A step of the whole model copies the gradients of a parameter group, and frees the copies after the group's update.

    Example:
        >>> gradient_copy_bytes("adamw_torch_fused", (1024, 1024), "bf16", "fp32")
        2097152
    """
    copies = name == "adamw_torch_fused" and weight_dtype != gradient_dtype
    return BYTES[weight_dtype] * math.prod(shape) if copies else 0
