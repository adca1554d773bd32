"""Tables, test cases and costs of NF4; does not import torch.

The tables have bitsandbytes' exact values, so that bytes written by either are read by both.
"""

# N values, B values per block, K = ⌈N/B⌉ blocks

from __future__ import annotations

import math
from typing import Any

IMPLS = ("reference", "triton")

TABLE = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The 16 values: quantiles of a normal distribution, scaled to [−1, 1], with an exact zero at code 7."""

THRESHOLDS = (
    -0.8480964303016663,
    -0.6106328964233398,
    -0.4599952697753906,
    -0.33967941999435425,
    -0.23460739850997925,
    -0.13791173696517944,
    -0.045525018125772476,
    0.03979014977812767,
    0.12025525420904160,
    0.20352125167846680,
    0.29201376438140870,
    0.38931253552436830,
    0.50166338682174680,
    0.64278692007064820,
    0.86147838830947880,
)
"""The code of x is the number of thresholds below it: a tie rounds down. They are the midpoints of neighbours,
four of them an ulp off (indices 0, 8, 12, 14): read from the machine code of bitsandbytes' CUDA library, where
a decimal constant was rounded the other way than the CPU rounds the midpoint."""

BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
NESTED_BLOCK = 256
FUSED_ROWS = 2
"""Maximum number of rows of x for which `matmul` dequantizes inside the product."""
SMALLEST_NORMAL = 2.0**-126
"""bitsandbytes is compiled with subnormals flushed to zero: below this a scale or a result is 0."""

CASES: tuple[tuple[tuple[int, ...], int], ...] = (
    ((64, 64), 64),
    ((7, 33), 64),  # odd count, blocks that span rows, a short last block
    ((1,), 32),
    ((5, 3, 11), 32),
    ((130, 100), 128),
    ((3, 4096), 4096),
    ((2, 5000), 2048),
    ((300, 64), 64),  # more than one nested block
)
"""(shape, block) of the tests; beyond 2³¹ elements only on a GPU."""

LARGE_CASE: tuple[tuple[int, ...], int] = ((2**16 + 1, 2**15 + 8), 64)


def dynamic_map() -> tuple[float, ...]:
    """The 256 values of the 8-bit map of block scales, ascending ("dynamic" in bitsandbytes): 7 decades,
    each with twice as many steps as the one below.

    Computed in fp32 with fused multiply-adds, as torch.linspace does on the CPUs that wrote existing files;
    without the fusion 42 of the values would be off by their last bit.

    Example:
        >>> values = dynamic_map()
        >>> len(values), values[127], values[255]
        (256, 0.0, 1.0)
    """
    import numpy as np

    low, high = np.float32(0.1), np.float32(1.0)
    values = [0.0, 1.0]
    for decade in range(7):
        steps = 2**decade
        width = np.float64(np.float32((high - low) / np.float32(steps)))
        index = np.arange(steps + 1)
        upward = (np.float64(low) + width * index).astype(np.float32)
        downward = (np.float64(high) - width * (steps - index)).astype(np.float32)
        edges = np.where(index < (steps + 1) // 2, upward, downward)
        means = (edges[:-1] + edges[1:]) / np.float32(2.0)
        # the power is rounded to fp32 before the product, as a Python scalar is in an operation with a tensor
        scaled = (np.float32(10.0 ** (decade - 6)) * means).tolist()
        values += scaled + [-value for value in scaled]
    return tuple(sorted(values))


NUM_BINS = 32


def bins() -> tuple[float, ...]:
    """For each of 32 bins of a scaled value, bin round(15 x) + 16: a threshold, then how many are below it.

    A bin is 1/15 wide and the closest thresholds are 0.0805 apart, so none contains two. A bin without one gets the
    last threshold below it.

    Example:
        >>> values = bins()
        >>> len(values), values[17], values[32 + 17]  # 1/30 to 3/30: codes 7 and 8 at either side of 0.0398
        (64, 0.03979014977812767, 7.0)
    """
    bin_of_threshold = [round(15 * threshold) + 16 for threshold in THRESHOLDS]
    index = [
        max([0, *(k for k, threshold_bin in enumerate(bin_of_threshold) if threshold_bin <= bin_index)])
        for bin_index in range(NUM_BINS)
    ]
    return (*(THRESHOLDS[k] for k in index), *(float(k) for k in index))


def num_blocks(count: int, block: int) -> int:
    """Number of blocks; the last may be shorter."""
    return -(-count // block)


def weight_bytes(shape: tuple[int, ...], block: int = 64, double: bool = True) -> int:
    """Bytes of a quantized weight: half a byte per value, plus the scales.

    Example:
        >>> weight_bytes((4096, 4096)) / 4096**2  # 0.516 bytes, 4.13 bits per value
        0.5159342288970947
    """
    count = math.prod(shape)
    blocks = num_blocks(count, block)
    scales = blocks + 4 * num_blocks(blocks, NESTED_BLOCK) + 4 * 257 if double else 4 * blocks
    return -(-count // 2) + scales + 4 * 16


def dequantize_bytes_moved(
    shape: tuple[int, ...], out_bytes: int = 2, block: int = 64, double: bool = True
) -> int:
    """Bytes moved by dequantizing: each code and scale read once, each value written once."""
    return weight_bytes(shape, block, double) + out_bytes * math.prod(shape)


def quantize_bytes_moved(
    shape: tuple[int, ...], in_bytes: int = 2, block: int = 64, double: bool = True
) -> int:
    """Bytes moved by quantizing: values read, codes written; double quantization also writes and reads fp32 scales."""
    scales = num_blocks(math.prod(shape), block)
    return in_bytes * math.prod(shape) + weight_bytes(shape, block, double) + (12 * scales if double else 0)


def matmul_bytes_moved(
    rows: int, shape: tuple[int, int], value_bytes: int = 2, block: int = 64, double: bool = True
) -> int:
    """Bytes moved by x [rows, K] · W [N, K]ᵀ without the dequantized weight in memory."""
    return weight_bytes(shape, block, double) + rows * value_bytes * sum(shape)


def matmul_flops(rows: int, shape: tuple[int, int]) -> int:
    """FLOPs of x [rows, K] · W [N, K]ᵀ."""
    return 2 * rows * math.prod(shape)


SAVED_FOR_BACKWARD = 0
"""Activation bytes that `matmul` saves: the weight is frozen, the gradient of x needs only the weight."""


def scratch_bytes(shape: tuple[int, int], rows: int, value_bytes: int = 2) -> int:
    """Temporary memory of `matmul`: the dequantized weight, above `FUSED_ROWS` rows."""
    return 0 if rows <= FUSED_ROWS else value_bytes * math.prod(shape)


def make_inputs(
    case: tuple[tuple[int, ...], int], *, seed: int = 0, dtype: str = "fp32", device: str = "cpu"
) -> Any:
    """A weight like trained ones (normal, rows of different magnitude), with some exact zeros."""
    import torch

    shape, _ = case
    generator = torch.Generator().manual_seed(seed)
    kind = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
    weight = torch.randn(shape, generator=generator) * 0.02
    weight = weight * torch.exp2(torch.rand(shape[:1] + (1,) * (len(shape) - 1), generator=generator) * 4)
    weight[torch.rand(shape, generator=generator) < 0.01] = 0.0
    return weight.to(kind).to(device)
