"""Why norms are computed in fp32: compares an RMSNorm that rounds every step to 16 bits with fp64."""

# D width of a token's activations

from __future__ import annotations

from dataclasses import dataclass

import torch

from trimtab.facts.dtypes import TORCH_NAMES
from trimtab.kernels.rms_norm import rms_norm

WIDTH = 4096
EPS = 1e-6
SCALES = (1e-4, 1e-2, 1.0, 16.0, 100.0, 1000.0)
"""Root mean squares of activations."""


@dataclass(frozen=True)
class NormRow:
    """A norm of activations of one magnitude in one dtype."""

    format: str
    scale: float
    overflowed: float
    """Share of the squares that became infinity."""
    vanished: float
    """Share of the squares that became 0."""
    mean_square: float
    """Exact, of the activations rounded to the dtype."""
    torch_mean_square: float
    """`(x * x).mean()`: squares in the dtype, their sum in fp32 inside of torch, the mean in the dtype."""
    sequential_mean_square: float
    """The squares added one by one in the dtype."""
    error: float
    """Relative rms error, against fp64, of the norm with all steps in the dtype; 1 if the output is 0."""
    error_fp32_inside: float
    """Relative rms error of the norm that is computed in fp32 and rounded once."""


def study_norms(device: str = "cpu", seed: int = 0) -> tuple[NormRow, ...]:
    """Norms in fp16 and bf16 of activations with every root mean square in SCALES.

    Example:
        >>> large = study_norms()[5]
        >>> large.format, large.scale, large.torch_mean_square
        ('fp16', 1000.0, inf)
    """
    generator = torch.Generator().manual_seed(seed)
    unit_D = torch.randn(WIDTH, generator=generator, dtype=torch.float64).to(device)
    return tuple(_row(name, scale, scale * unit_D) for name in ("fp16", "bf16") for scale in SCALES)


def _row(name: str, scale: float, exact_D: torch.Tensor) -> NormRow:
    dtype = getattr(torch, TORCH_NAMES[name])
    x_D = exact_D.to(dtype)
    wide_D = x_D.double()
    truth_D = wide_D * (wide_D.square().mean() + EPS).rsqrt()
    squares_D = x_D * x_D
    narrow_D = x_D * (squares_D.mean() + EPS).rsqrt()
    weight_D = torch.ones_like(x_D)
    inside_D = rms_norm(x_D, weight_D, EPS)
    return NormRow(
        name,
        scale,
        float(squares_D.isinf().double().mean()),
        float((squares_D == 0).double().mean()),
        float(wide_D.square().mean()),
        float(squares_D.mean()),
        _sequential_sum(squares_D) / WIDTH,
        _distance(narrow_D, truth_D),
        _distance(inside_D, truth_D),
    )


def _sequential_sum(squares_D: torch.Tensor) -> float:
    total = torch.zeros((), dtype=squares_D.dtype)
    for square in squares_D.cpu():
        total += square
    return total.item()


def _distance(found_D: torch.Tensor, truth_D: torch.Tensor) -> float:
    return float((found_D.double() - truth_D).norm() / truth_D.norm())
