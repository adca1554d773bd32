"""Constants, test cases and costs of the 8-bit AdamW step; does not import torch."""

# R rows, C columns (last dimension), K blocks per row

from __future__ import annotations

import math
from typing import Any, NamedTuple

IMPLS = ("reference", "triton", "triton_exact")

BLOCK = 256
"""Number of elements that share a scale."""

TOP1, TOP2, FIRST_LEVEL = 127, 271, 16
"""Top levels of the two quantization maps (code.py), and the lowest level of the second."""

GRID = 65536.0
"""Adding and subtracting this rounds a value below 65536 to a multiple of 1/128."""

TINY = 2.0**-90
"""A block whose maximum is smaller is treated as zero: the scale's reciprocal would not be finite."""

GROUP = 8
"""Number of neighbouring elements in a row whose random words derive from one hash."""

MULTIPLIER = 0x915F77F5
"""The k-th word of a group is hash · MULTIPLIERᵏ mod 2³²: a generator with a good spectrum up to eight dimensions
(Steele and Vigna, "Computationally easy, spectrally good multipliers", 2021)."""

MIN_8BIT_SIZE = 4096
"""Tensors of fewer elements have fp32 moments: norms and biases, where 8 bits would save nothing."""

CHUNK = {"cpu": 1 << 18, "cuda": 1 << 22}
"""Elements per chunk, of which fp32 copies are live. On a CPU calls into torch cost more than cache misses (2¹⁴ takes
twice as long as 2¹⁸). On a GPU it bounds temporary memory at 0.2 GB; smaller chunks would not fill a large GPU."""

CASES: tuple[tuple[int, ...], ...] = (
    (64, 256),  # whole blocks
    (7, 300),  # rows that end in a short block
    (33, 5),  # rows shorter than a block
    (700, 16),  # the same, filling a narrow block
    (130, 96),
    (9, 8),  # rows of one group
    (40, 576),  # whole groups, the last block filling a narrower one
    (21, 712),  # the same, not filling it
    (4097,),  # one dimension
    (3, 4, 257),  # three dimensions
    (1, 1),
    (),
    (0,),
    (5, 0),
    (2, 300_000),  # rows longer than a chunk
)
"""Shapes of the tests."""

ALLOWED_SHARE = 1e-6
"""Tolerance of weights relative to the fp64 truth: the plain fp32 step's own error plus this share of its rms."""


def grid(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(rows, columns, blocks per row) of a parameter.

    Example:
        >>> grid((3, 4, 257)), grid((512,)), grid(())
        ((12, 257, 2), (1, 512, 2), (1, 1, 1))
    """
    columns = shape[-1] if shape else 1
    return math.prod(shape[:-1]), columns, -(-columns // BLOCK)


def width(columns: int) -> int:
    """Width of a block in the kernel: 256, less for shorter rows.

    The rows of a LoRA adapter's B are as long as its rank: with rank 16, 240 of 256 lanes would be idle.

    Example:
        >>> width(4096), width(16), width(5), width(100)
        (256, 16, 8, 128)
    """
    return min(BLOCK, max(GROUP, 1 << (max(columns, 1) - 1).bit_length()))


class Part(NamedTuple):
    """The blocks of a parameter that one launch updates."""

    kind: str
    """All blocks ("all") where rows are whole blocks of this width; otherwise the blocks of 256 before the last one of
    each row ("full"), or the last ones ("last")."""
    blocks: int
    """Blocks per row."""
    width: int
    """Width of a block in the kernel."""


def parts(columns: int) -> list[Part]:
    """Parts of a parameter with rows of `columns` elements, each with a launch of its own.

    No lane of the full blocks is idle, and the short block that ends a row is as narrow as it can be. With one launch
    for both, of blocks of 256, a quarter of the lanes would be idle for rows of 576 elements.

    Example:
        >>> [tuple(part) for part in parts(1024)], [tuple(part) for part in parts(16)]
        ([('all', 4, 256)], [('all', 1, 16)])
        >>> [tuple(part) for part in parts(576)], [tuple(part) for part in parts(100)]
        ([('full', 2, 256), ('last', 1, 64)], [('last', 1, 128)])
    """
    narrowest = width(columns)
    if columns % narrowest == 0:
        return [Part("all", columns // narrowest, narrowest)]
    full = (columns - 1) // BLOCK
    last = Part("last", 1, width(columns - full * BLOCK))
    return [Part("full", full, BLOCK), last] if full else [last]


def peak(top: int) -> float:
    """The value that a block's largest magnitude is scaled to before encoding: 1/64 of a level below the top.

    Example:
        >>> round(peak(127) ** 0.25, 6)
        253.96875
    """
    return (2 * (top - 1 / 64)) ** 4


def state_bytes(shape: tuple[int, ...]) -> int:
    """Bytes of the two 8-bit moments: two per element, and two fp32 scales per block.

    Example:
        >>> state_bytes((1024, 1024))  # 2 + 8/256 bytes per element
        2129920
    """
    rows, _, blocks = grid(shape)
    return 2 * math.prod(shape) + 8 * rows * blocks


def scratch_bytes(
    shape: tuple[int, ...], device: str = "cpu", weight_bytes: int = 2, impl: str = "reference"
) -> int:
    """Peak temporary bytes: with torch 57 per element of a chunk, padded to full blocks, and on a GPU a snapshot of the
    chunk in case the step is skipped; none with Triton. A single chunk is not in memory with the one before: 45 per
    padded element, and 8 per element itself (4 for fp32 weights).

    Example:
        >>> scratch_bytes((1024, 1024)), scratch_bytes((1024, 1024), impl="triton")
        (14942208, 0)
    """
    if impl != "reference":
        return 0
    rows, columns, blocks = grid(shape)
    chunk = CHUNK[device]
    height = min(rows, max(1, chunk // max(columns, 1)))
    padded, own = (height * min(width, chunk) for width in (blocks * BLOCK, columns))
    kept = 0 if device == "cpu" else (weight_bytes + 2) * own
    if math.prod(shape) <= chunk:
        return 45 * padded + (8 if weight_bytes < 4 else 4) * own + kept
    return 57 * padded + kept


def bytes_moved(shape: tuple[int, ...], weight_bytes: int, grad_bytes: int) -> int:
    """Bytes moved by a fused kernel: weight and moments read and written, gradient read."""
    return math.prod(shape) * (2 * weight_bytes + grad_bytes) + 2 * state_bytes(shape)


def flops(shape: tuple[int, ...]) -> int:
    """FLOPs, about 70 per element: dequantize 8, moments 7, update 7, quantize 32, random bits and rounding 16."""
    return 70 * math.prod(shape)


SMALL_TILE = 1024
"""Elements per program for tensors with fp32 moments."""


class Configuration(NamedTuple):
    """Launch configuration of the Triton kernel."""

    blocks: int
    """Blocks of 256 per tile; with narrow blocks, tiles have the same number of elements."""
    times: int
    """Tiles per program, processed in a loop."""
    warps: int
    stages: int = 1


def configuration(capability: int) -> Configuration:
    """Returns the launch configuration for a GPU: a pure function, so that results do not depend on a measurement.

    The best of 36 on an H200, except that 32 tiles per program are 0.6 % faster but too few programs for one tensor.
    """
    return Configuration(blocks=2, times=16, warps=2, stages=3)


def make_inputs(
    case: tuple[int, ...], *, seed: int = 0, weight_dtype: str = "fp32", device: str = "cpu"
) -> Any:
    """Returns (param, grad); gradients span six orders of magnitude within a row, as real ones do."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[weight_dtype]
    param = (torch.randn(case, generator=generator) * 0.02).to(dtype)
    size = torch.pow(10.0, torch.rand(case, generator=generator) * -6)
    return param.to(device), (torch.randn(case, generator=generator) * size).to(device)
