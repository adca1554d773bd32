"""What the weighted sum is tested on and what it costs; no torch at import."""

# N rows, D numbers in a row

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trimtab.facts.dtypes import BYTES, TORCH_NAMES

if TYPE_CHECKING:
    import torch

IMPLS = ("reference", "triton")

ROWS, COLUMNS = 4, 1024
"""A tile: 4096 numbers, 32 a thread with four warps. Wide, so that a row is read in long pieces: on an H200 29 and 46
µs forward and backward at 8192 × 4096, against 37 and 67 with 32 × 128."""
MOST_CHUNKS = 128
"""Parts in which the rows are added up for w's gradient: enough programs for the widest chips."""


@dataclass(frozen=True)
class Case:
    """One shape to be right on."""

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
    Case("rows of nothing", N=5, D=0),
)
LARGE_CASES = (Case("model sized", N=8192, D=4096), Case("past 2^31 numbers", N=70_000, D=32_768))
"""For a GPU."""


def make_inputs(
    case: Case, dtype: str, device: str = "cpu", seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x_ND, w_D), the same numbers in every dtype: they are bf16 numbers."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        x = torch.randn(shape, generator=generator, device=device).bfloat16()
        return x.to(getattr(torch, TORCH_NAMES[dtype]))

    return draw(case.N, case.D), draw(case.D)


def chunk_rows(N: int) -> int:
    """Rows that one program of the backward adds up: whole tiles.

    Example:
        >>> chunk_rows(1), chunk_rows(8192), chunk_rows(100_000)
        (4, 64, 784)
    """
    tiles = -(-N // ROWS)
    return max(-(-tiles // MOST_CHUNKS), 1) * ROWS


def flops(N: int, D: int, *, backward: bool = False) -> int:
    """A product and a sum for each number; in the backward for each of two gradients, less one sum."""
    return 3 * N * D if backward else 2 * N * D


def bytes_moved(N: int, D: int, dtype: str, *, backward: bool = False) -> int:
    """The least: everything read once, everything written once."""
    forward = N * D + D + N
    return BYTES[dtype] * (2 * N * D + 2 * D + N if backward else forward)


def saved_bytes(N: int, D: int, dtype: str) -> int:
    """Kept for the backward beyond x and w themselves: nothing."""
    return 0


def scratch_bytes(N: int, D: int, dtype: str) -> int:
    """The chunks' parts of w's gradient, in fp32, in the backward."""
    return 4 * D * -(-N // chunk_rows(N))
