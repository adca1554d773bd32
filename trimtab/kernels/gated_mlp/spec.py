"""Test cases and costs of the gated activation; does not import torch."""

# N rows, W elements per row (the layer's intermediate size)

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trimtab.facts.dtypes import BYTES, TORCH_NAMES

if TYPE_CHECKING:
    import torch

IMPLS = ("reference", "triton")
ACTIVATIONS = ("silu", "gelu_tanh", "gelu")

BLOCK, WARPS = 1024, 4
"""Elements per program: 8 per thread, one 16-byte load each for 16-bit dtypes. The same on every GPU."""


@dataclass(frozen=True)
class Case:
    """Sizes and arguments of a test; `fused` makes gate and up two halves of one tensor's rows."""

    name: str
    N: int
    W: int
    activation: str = "silu"
    fused: bool = False
    scale: float = 1.0


CASES = (
    Case("plain", N=8, W=64),
    Case("one", N=1, W=1),
    Case("odd, tanh", N=7, W=193, activation="gelu_tanh"),
    Case("odd, erf", N=5, W=33, activation="gelu"),
    Case("longer than a block", N=3, W=1100),
    Case("halves of one tensor", N=6, W=70, fused=True),
    Case("halves of one tensor, longer than a block", N=2, W=1030, activation="gelu_tanh", fused=True),
    Case("large numbers", N=4, W=40, scale=30.0),
    Case("large numbers, tanh", N=4, W=40, activation="gelu_tanh", scale=30.0),
    Case("large numbers, erf", N=4, W=40, activation="gelu", scale=30.0),
    Case("empty", N=0, W=8),
)
LARGE_CASES = (
    Case("8192x14336 SwiGLU", N=8192, W=14_336),
    Case("8192x14336 SwiGLU halves", N=8192, W=14_336, fused=True),
    Case("8192x9216 GeGLU", N=8192, W=9216, activation="gelu_tanh"),
)
"""For a GPU; also timed."""


def make_inputs(case: Case, dtype: str, device: str = "cpu", seed: int = 0) -> dict[str, torch.Tensor]:
    """Returns gate_NW and up_NW, the same bf16 values in every dtype."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)
    both = torch.randn(case.N, 2 * case.W, generator=generator, device=device).bfloat16()
    both = both.to(getattr(torch, TORCH_NAMES[dtype]))
    gate, up = (both * case.scale).split(case.W, dim=1)
    return {"gate": gate, "up": up} if case.fused else {"gate": gate.contiguous(), "up": up.contiguous()}


def flops(N: int, W: int, *, backward: bool = False) -> int:
    """About ten per element (an exponential counts as four), twice as many in the backward."""
    return N * W * (20 if backward else 10)


def bytes_moved(N: int, W: int, dtype: str, *, backward: bool = False) -> int:
    """Lower bound: three tensors in the forward; three read and two written in the backward."""
    return N * W * BYTES[dtype] * (5 if backward else 3)


def saved_bytes(N: int, W: int, dtype: str, *, impl: str = "triton") -> int:
    """Bytes saved for the backward: gate and up; the reference also saves act(gate)."""
    return N * W * BYTES[dtype] * (3 if impl == "reference" else 2)


def scratch_bytes(N: int, W: int, dtype: str) -> int:
    """Temporary memory: none in either pass."""
    return 0
