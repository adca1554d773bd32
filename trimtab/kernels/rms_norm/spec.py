"""Test cases, launch configurations per GPU and costs of the norm; does not import torch."""

# N rows, D elements per row

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trimtab.facts.dtypes import BYTES, TORCH_NAMES

if TYPE_CHECKING:
    import torch

IMPLS = ("reference", "triton")

MAX_COLUMNS = 16_384
"""Elements of the longest row that fits into the registers of one program (the hidden size of Llama 405B)."""

PROGRAMS = {75: 80, 80: 216, 86: 168, 89: 256, 90: 264, 100: 296, 120: 340}
"""Programs of the backward by compute capability: two per multiprocessor of the largest common card. Each writes one
partial sum of the weight's gradient, so the order of the reduction, and with it the last bits, is fixed per
capability."""


@dataclass(frozen=True)
class Configuration:
    """Launch configuration: rows and columns of a tile, warps, programs (of the backward)."""

    rows: int
    columns: int
    warps: int
    programs: int


def programs(capability: int) -> int:
    """Number of programs of the backward; an unlisted capability uses the next lower one's.

    Example:
        >>> programs(90), programs(87)
        (264, 168)
    """
    return PROGRAMS[max((known for known in PROGRAMS if known <= capability), default=75)]


def forward_configuration(D: int, capability: int) -> Configuration:
    """Whole rows, about 4096 elements per tile, 32 per thread.

    Example:
        >>> forward_configuration(4096, 90)
        Configuration(rows=1, columns=4096, warps=4, programs=0)
    """
    columns = max(1 << (D - 1).bit_length(), 16)
    rows = max(4096 // columns, 1)
    return Configuration(rows, columns, rows * columns // 1024, 0)


def backward_configuration(D: int, capability: int) -> Configuration:
    """Three fp32 tiles (input, gradient, the weight's partial sums) are live at once: 16 elements per thread of each.

    Example:
        >>> backward_configuration(4096, 90)
        Configuration(rows=1, columns=4096, warps=8, programs=264)
    """
    columns = max(1 << (D - 1).bit_length(), 16)
    rows = max(4096 // columns, 1)
    return Configuration(rows, columns, rows * columns // 512, programs(capability))


def configurations(capability: int) -> list[tuple[str, Configuration]]:
    """All configurations used on a GPU: ("forward" or "backward", configuration)."""
    widths = [1 << power for power in range(4, MAX_COLUMNS.bit_length())]
    return [("forward", forward_configuration(D, capability)) for D in widths] + [
        ("backward", backward_configuration(D, capability)) for D in widths
    ]


@dataclass(frozen=True)
class Case:
    """Sizes and arguments of a test."""

    name: str
    N: int
    D: int
    residual: bool = False
    scale: float = 1.0
    eps: float = 1e-6
    offset: float = 0.0
    branch: bool = False
    """Whether x is a branch that is normalized before the residual addition (`norm_add`); requires `residual`."""
    next_norm: bool = False
    """Whether a norm follows the addition of a branch (`norm_add_norm`)."""


CASES = (
    Case("plain", N=12, D=64),
    Case("plain with residual", N=12, D=64, residual=True),
    Case("one", N=1, D=1),
    Case("odd", N=37, D=193),
    Case("odd with residual", N=7, D=65, residual=True),
    Case("wide", N=3, D=4100),
    Case("many narrow rows", N=600, D=8, residual=True),
    Case("tiny numbers, where eps counts", N=9, D=33, scale=1e-3),
    Case("large numbers", N=9, D=33, scale=100.0, residual=True),
    Case("no rows", N=0, D=8),
)
OFFSET_CASES = (
    Case("offset", N=12, D=64, offset=1.0),
    Case("offset with residual", N=7, D=65, residual=True, offset=1.0),
)
BRANCH_CASES = (
    Case("branch", N=12, D=64, residual=True, branch=True),
    Case("branch, next norm", N=12, D=64, residual=True, branch=True, next_norm=True),
    Case("branch, offset, odd", N=7, D=65, residual=True, branch=True, offset=1.0),
    Case(
        "branch, next norm, offset, odd", N=37, D=193, residual=True, branch=True, next_norm=True, offset=1.0
    ),
    Case("branch, next norm, wide", N=3, D=1030, residual=True, branch=True, next_norm=True),
    Case("branch, next norm, many narrow rows", N=600, D=8, residual=True, branch=True, next_norm=True),
    Case("branch of tiny numbers", N=9, D=33, residual=True, scale=1e-3, branch=True, next_norm=True),
    Case("branch without rows", N=0, D=8, residual=True, branch=True),
    Case("branch, next norm, without rows", N=0, D=8, residual=True, branch=True, next_norm=True),
)
LARGE_CASES = (
    Case("8192x4096", N=8192, D=4096),
    Case("8192x4096 residual", N=8192, D=4096, residual=True),
    Case("16384x576 residual", N=16_384, D=576, residual=True),
    Case("4096x1024 residual", N=4096, D=1024, residual=True),
    Case("131072x128", N=131_072, D=128),
    Case("widest", N=300, D=MAX_COLUMNS),
)
"""For a GPU; all but the last are also timed."""
LARGE_OFFSET_CASES = (Case("8192x3584 offset, residual", N=8192, D=3584, residual=True, offset=1.0),)
LARGE_BRANCH_CASES = (
    Case("8192x4096 branch", N=8192, D=4096, residual=True, branch=True),
    Case("8192x3584 branch, next norm, offset", 8192, 3584, True, offset=1.0, branch=True, next_norm=True),
    Case("widest branch, next norm", N=300, D=MAX_COLUMNS, residual=True, branch=True, next_norm=True),
)
"""For a GPU."""


def make_inputs(case: Case, dtype: str, device: str = "cpu", seed: int = 0) -> dict[str, torch.Tensor]:
    """x, weight (around 1, the offset included) and, where the case has one, residual and next_weight: the same
    bf16 values in every dtype."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def to_dtype(x: torch.Tensor) -> torch.Tensor:
        return x.bfloat16().to(getattr(torch, TORCH_NAMES[dtype]))

    inputs = {
        "x": to_dtype(draw(case.N, case.D) * case.scale),
        "weight": to_dtype(1 - case.offset + 0.3 * draw(case.D)),
    }
    if case.residual:
        inputs["residual"] = to_dtype(draw(case.N, case.D) * case.scale)
    if case.next_norm:
        inputs["next_weight"] = to_dtype(1 - case.offset + 0.3 * draw(case.D))
    return inputs


def flops(N: int, D: int, *, branch: bool = False, next_norm: bool = False, backward: bool = False) -> int:
    """Additions and multiplications of a norm: square, sum, scale, weight in the forward; three times as many in the
    backward. Plus the addition of a branch in the forward, and of its gradient in the backward where a norm follows."""
    norms = 2 if next_norm else 1
    return N * D * (norms * (12 if backward else 4) + (next_norm if backward else branch))


def bytes_moved(
    N: int,
    D: int,
    dtype: str,
    *,
    residual: bool = False,
    branch: bool = False,
    next_norm: bool = False,
    backward: bool = False,
) -> int:
    """Lower bound: every tensor read or written once, plus the fp32 scale per row and norm.

    Example:
        >>> rows = 8192 * 4096 * 2
        >>> bytes_moved(8192, 4096, "bf16", branch=True, next_norm=True) // rows
        4
        >>> bytes_moved(8192, 4096, "bf16", branch=True, next_norm=True, backward=True) // rows
        6
    """
    norms = 2 if next_norm else 1
    if backward:  # gradient(s) and input(s) read, one gradient written for each input that has its own
        tensors = (6 if next_norm else 3) if branch else (4 if residual else 3)
        return BYTES[dtype] * (tensors * N * D + 2 * norms * D) + 4 * norms * N
    tensors = (4 if next_norm else 3) if branch else (4 if residual else 2)
    return BYTES[dtype] * (tensors * N * D + norms * D) + 4 * norms * N


def saved_bytes(
    N: int, D: int, dtype: str, *, impl: str = "triton", branch: bool = False, next_norm: bool = False
) -> int:
    """Bytes saved for the backward in addition to the input (or h): the scale per row and norm. A branch counts too: no
    other operation saves a projection's output."""
    return 4 * N * (2 if next_norm else 1) + (N * D * BYTES[dtype] if branch else 0)


def scratch_bytes(N: int, D: int, dtype: str, capability: int = 90, *, next_norm: bool = False) -> int:
    """Bytes of the programs' partial sums of the weights' gradients, in the backward pass."""
    return 4 * D * programs(capability) * (2 if next_norm else 1)
