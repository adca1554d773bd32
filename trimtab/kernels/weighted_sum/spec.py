"""Test cases and costs of the weighted sum; does not import torch."""

# N rows, D elements per row

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trimtab.facts.dtypes import BYTES, TORCH_NAMES

if TYPE_CHECKING:
    import torch

IMPLS = ("reference", "triton")

ROWS, COLUMNS = 4, 1024
"""A tile: 4096 elements, 32 per thread with four warps. Wide, so that rows are read in long contiguous pieces: on an
H200 29 and 46 µs forward and backward at 8192 × 4096, against 37 and 67 with 32 × 128."""
MAX_CHUNKS = 128
"""Chunks of rows, each with its partial sum of w's gradient: enough programs to fill the largest GPUs."""


@dataclass(frozen=True)
class Case:
    """Sizes of the tensors in a test."""

    name: str
    N: int
    D: int


CASES = (
    Case("plain", N=64, D=128),
    Case("one", N=1, D=1),
    Case("odd", N=37, D=193),
    Case("one wide row", N=1, D=1000),
    Case("many narrow rows", N=700, D=3),
    Case("no rows", N=0, D=8),
    Case("empty rows", N=5, D=0),
)
LARGE_CASES = (Case("model sized", N=8192, D=4096), Case("more than 2^31 elements", N=70_000, D=32_768))
"""For a GPU."""


def make_inputs(
    case: Case, dtype: str, device: str = "cpu", seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (x_ND, w_D), the same bf16 values in every dtype."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        x = torch.randn(shape, generator=generator, device=device).bfloat16()
        return x.to(getattr(torch, TORCH_NAMES[dtype]))

    return draw(case.N, case.D), draw(case.D)


def chunk_rows(N: int) -> int:
    """Rows that one program of the backward reduces: a multiple of a tile's rows.

    Example:
        >>> chunk_rows(1), chunk_rows(8192), chunk_rows(100_000)
        (4, 64, 784)
    """
    tiles = -(-N // ROWS)
    return max(-(-tiles // MAX_CHUNKS), 1) * ROWS


def flops(N: int, D: int, *, backward: bool = False) -> int:
    """A multiply and an add per element; in the backward for each of two gradients, minus one add."""
    return 3 * N * D if backward else 2 * N * D


def bytes_moved(N: int, D: int, dtype: str, *, backward: bool = False) -> int:
    """Lower bound: every tensor is read or written once."""
    forward = N * D + D + N
    return BYTES[dtype] * (2 * N * D + 2 * D + N if backward else forward)


def saved_bytes(N: int, D: int, dtype: str) -> int:
    """Bytes saved for the backward in addition to x and w: none."""
    return 0


def scratch_bytes(N: int, D: int, dtype: str) -> int:
    """The chunks' partial sums of w's gradient, in fp32, in the backward."""
    return 4 * D * -(-N // chunk_rows(N))
