"""Constants, test cases and costs of the AdamW step with fp32 or bf16 moments; does not import torch."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from trimtab.kernels.adamw8bit.spec import CHUNK

IMPLS = ("reference", "triton")

STREAMS = {"weight": 0, "exp_avg": 1, "exp_avg_sq": 2}
"""The stream of random bits that rounds each tensor of a parameter."""

GROUP = 8
"""Elements that a thread loads at once: 16 bytes of bf16."""

REFERENCE_BYTES = {4: 36, 2: 44}
"""Temporary bytes per element of a chunk with torch's operations, by the bytes of a moment's element."""

CASES: tuple[tuple[int, ...], ...] = ((64, 256), (7, 300), (33, 5), (4097,), (3, 4, 257), (1, 1), (), (9, 8))
"""Shapes of the tests: whole tiles, odd sizes, one element."""


def scratch_bytes(
    count: int, device: str = "cpu", *, weight_bytes: int = 2, moment_bytes: int = 4, impl: str = "reference"
) -> int:
    """Peak temporary bytes of one parameter's step.

    With torch's operations 36 or 44 per element of a chunk, and on a GPU a snapshot of the chunk in case the step is
    skipped; none with Triton.

    Example:
        >>> scratch_bytes(1 << 20), scratch_bytes(1 << 20, "cuda", impl="triton")
        (9437184, 0)
    """
    if impl == "triton":
        return 0
    piece = min(count, CHUNK[device])
    kept = 0 if device == "cpu" else piece * (weight_bytes + 2 * moment_bytes)
    return REFERENCE_BYTES[moment_bytes] * piece + kept


def bytes_moved(shape: tuple[int, ...], weight_bytes: int, grad_bytes: int, moment_bytes: int) -> int:
    """Bytes moved by the fused kernel: weight and moments read and written, gradient read.

    Example:
        >>> bytes_moved((1024, 1024), 2, 2, 4) // 1024**2
        22
    """
    return math.prod(shape) * (2 * weight_bytes + grad_bytes + 4 * moment_bytes)


class Configuration(NamedTuple):
    """Launch configuration of the Triton kernel."""

    size: int
    """Elements per tile."""
    times: int
    """Tiles per program, processed in a loop."""
    warps: int
    stages: int


def configuration(capability: int) -> Configuration:
    """Returns the launch configuration for a GPU: a pure function, so that results do not depend on a measurement.

    Eight elements per thread, as in the 8-bit kernel. Not tuned.

    Example:
        >>> configuration(90).size
        1024
    """
    return Configuration(size=1024, times=8, warps=4, stages=2)


def make_inputs(
    case: tuple[int, ...], *, seed: int = 0, weight_dtype: str = "bf16", device: str = "cpu"
) -> Any:
    """Returns (param, grad): those of the 8-bit step, whose gradients span six orders of magnitude."""
    from trimtab.kernels.adamw8bit import spec

    return spec.make_inputs(case, seed=seed, weight_dtype=weight_dtype, device=device)
