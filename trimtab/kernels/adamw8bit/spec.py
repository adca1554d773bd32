"""What the 8-bit AdamW step promises and costs; no torch at import."""

# R rows, C columns (last dimension), K blocks a row

from __future__ import annotations

import math
from typing import Any, NamedTuple

IMPLS = ("reference", "triton", "triton_exact")

BLOCK = 256
"""Values that share a scale."""

TOP1, TOP2, FIRST_LEVEL = 127, 271, 16
"""Highest levels of the two codes (code.py), and the lowest of √v's."""

GRID = 65536.0
"""Added to a number below 65536 and taken away again, it leaves a multiple of 1/128."""

TINY = 2.0**-90
"""A block whose largest moment is smaller counts as zero: the scale's reciprocal would not be finite."""

GROUP = 8
"""Neighbours in a row whose random words follow from one hash."""

MULTIPLIER = 0x915F77F5
"""The k-th word of a group is hash · MULTIPLIERᵏ mod 2³²: a generator with a good spectrum up to eight dimensions
(Steele and Vigna, "Computationally easy, spectrally good multipliers", 2021)."""

SMALL = 4096
"""Tensors of fewer elements keep fp32 moments: norms and biases, where 8 bits would save nothing."""

CHUNK = {"cpu": 1 << 18, "cuda": 1 << 22}
"""Elements whose fp32 copies exist at once. On a CPU calls into torch cost more than leaving the cache (2¹⁴
takes twice as long as 2¹⁸); on a GPU it bounds the scratch at 0.2 GB, and fewer would not fill a large one.
"""

CASES: tuple[tuple[int, ...], ...] = (
    (64, 256),  # whole blocks
    (7, 300),  # rows that end in a short block
    (33, 5),  # rows shorter than a block
    (700, 16),  # the same, full to the last place of a narrow one
    (130, 96),
    (4097,),  # one dimension
    (3, 4, 257),  # three dimensions
    (1, 1),
    (),
    (0,),
    (5, 0),
    (2, 300_000),  # rows longer than a chunk
)
"""Shapes that tests run."""

ALLOWED_SHARE = 1e-6
"""Weights may miss fp64 truth by the plain fp32 step's own error plus this share of the truth's rms."""


def grid(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(rows, columns, blocks a row) of a parameter.

    Example:
        >>> grid((3, 4, 257)), grid((512,)), grid(())
        ((12, 257, 2), (1, 512, 2), (1, 1, 1))
    """
    columns = shape[-1] if shape else 1
    return math.prod(shape[:-1]), columns, -(-columns // BLOCK)


def width(columns: int) -> int:
    """Places that a kernel gives a block of rows so long: 256, fewer for rows that are shorter.

    The rows of an adapter's second matrix are as long as its rank: of 256 places 240 would be idle.

    Example:
        >>> width(4096), width(16), width(5), width(100)
        (256, 16, 16, 128)
    """
    return min(BLOCK, max(NARROWEST, 1 << (max(columns, 1) - 1).bit_length()))


def peak(top: int) -> float:
    """What a block's largest magnitude is scaled to before it is encoded: 1/64 of a level below the top.

    Example:
        >>> round(peak(127) ** 0.25, 6)
        253.96875
    """
    return (2 * (top - 1 / 64)) ** 4


def state_bytes(shape: tuple[int, ...]) -> int:
    """Bytes of the two compressed moments: two an element, and two fp32 scales a block.

    Example:
        >>> state_bytes((1024, 1024))  # 2 + 8/256 bytes an element
        2129920
    """
    rows, _, blocks = grid(shape)
    return 2 * math.prod(shape) + 8 * rows * blocks


def scratch_bytes(
    shape: tuple[int, ...], device: str = "cpu", weight_bytes: int = 2, impl: str = "reference"
) -> int:
    """Most bytes held besides the arguments. In torch 57 an element of a chunk, padded to whole blocks, and on a
    GPU what the chunk held before, in case the step turns out to be skipped. In Triton nothing.

    Example:
        >>> scratch_bytes((1024, 1024)), scratch_bytes((1024, 1024), impl="triton")
        (14942208, 0)
    """
    if impl != "reference":
        return 0
    rows, columns, blocks = grid(shape)
    chunk = CHUNK[device]
    height = min(rows, max(1, chunk // max(columns, 1)))
    kept = 0 if device == "cpu" else height * min(columns, chunk) * (weight_bytes + 2)
    return 57 * height * min(blocks * BLOCK, chunk) + kept


def bytes_moved(shape: tuple[int, ...], weight_bytes: int, grad_bytes: int) -> int:
    """Traffic of a fused kernel: weight and moments read and written, gradient read."""
    return math.prod(shape) * (2 * weight_bytes + grad_bytes) + 2 * state_bytes(shape)


def flops(shape: tuple[int, ...]) -> int:
    """About 70 an element: decompress 8, moments 7, update 7, compress 32, random bits and rounding 16."""
    return 70 * math.prod(shape)


SMALL_TILE = 1024
"""Elements of a program that updates tensors with fp32 moments."""


NARROWEST = 16
"""Places of the narrowest block."""


class Configuration(NamedTuple):
    """Of the Triton kernel."""

    blocks: int
    """Worked on at once by a program; of narrow ones as many as have the same number of places."""
    times: int
    """How often, one after another."""
    warps: int
    stages: int = 1


def configuration(capability: int) -> Configuration:
    """What is launched on a chip: a pure function, so that results do not depend on a measurement.

    On an H200 of 36 that were tried; 32 times is 0.6 % faster still, and leaves too few programs for a tensor alone.
    """
    return Configuration(blocks=2, times=16, warps=2, stages=3)


def make_inputs(
    case: tuple[int, ...], *, seed: int = 0, weight_dtype: str = "fp32", device: str = "cpu"
) -> Any:
    """(param, grad): gradients spread over six orders of magnitude within a row, as real ones are."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[weight_dtype]
    param = (torch.randn(case, generator=generator) * 0.02).to(dtype)
    size = torch.pow(10.0, torch.rand(case, generator=generator) * -6)
    return param.to(device), (torch.randn(case, generator=generator) * size).to(device)
