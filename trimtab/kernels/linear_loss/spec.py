"""Implementations, test cases and costs of the general loss. Does not import torch."""

# N tokens, C hidden size, V vocabulary

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trimtab.facts.dtypes import BYTES, TORCH_NAMES

if TYPE_CHECKING:
    import torch

IMPLS = ("reference", "chunked")
REDUCTIONS = ("sum", "none")
CHUNK_BYTES = 64 * 2**20
FUNCTION_BUFFERS = 4
"""fp32 copies of a chunk's logits that a function and its derivative allocate: KL between two softmaxes
peaks at four."""


def chunk_tokens(N: int, V: int) -> int:
    """Rows of logits per chunk: 64 MiB in fp32, at least 16 rows.

    Example:
        >>> chunk_tokens(4096, 151_936), chunk_tokens(100, 50)
        (110, 100)
    """
    return max(min(max(CHUNK_BYTES // (4 * V), 16), N), 1)


@dataclass(frozen=True)
class Case:
    """Sizes and arguments of a test."""

    name: str
    N: int
    C: int
    V: int
    bias: bool = False
    chunk_tokens: int | None = None
    spread: float = 1.0
    """Standard deviation of the logits."""


CASES = (
    Case("plain", N=24, C=16, V=40),
    Case("tiny", N=1, C=8, V=2),
    Case("a ragged last chunk, bias", N=19, C=7, V=33, bias=True, chunk_tokens=5),
    Case("peaked", N=12, C=16, V=30, spread=10.0, chunk_tokens=4),
    Case("empty", N=0, C=4, V=9),
)


def make_inputs(
    case: Case, dtype: str, device: str = "cpu", seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Returns (hidden_NC, weight_VC, bias_V or None, labels_N), the same values for every dtype and device."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, std: float) -> torch.Tensor:
        x = (torch.randn(shape, generator=generator) * std).bfloat16()
        return x.to(device=device, dtype=getattr(torch, TORCH_NAMES[dtype]))

    hidden_NC, weight_VC = draw(case.N, case.C, std=1.0), draw(case.V, case.C, std=case.spread / case.C**0.5)
    bias_V = draw(case.V, std=1.0) if case.bias else None
    labels_N = torch.randint(0, case.V, (case.N,), generator=generator)
    return hidden_NC, weight_VC, bias_V, labels_N.to(device)


def flops(N: int, C: int, V: int, *, reduction: str = "sum", weight_grad: bool = True) -> int:
    """FLOPs of the products; reduction "none" recomputes the logits in the backward."""
    return (2 + int(weight_grad) + int(reduction == "none")) * 2 * N * C * V


def bytes_moved(N: int, C: int, V: int, dtype: str) -> int:
    """Lower bound: hidden and weight read once, their gradients written once."""
    return 2 * (N * C + V * C) * BYTES[dtype]


def saved_bytes(
    impl: str, N: int, C: int, V: int, dtype: str, *, reduction: str = "sum", weight_grad: bool = True
) -> int:
    """Bytes saved for the backward in addition to hidden and weight; the reference's depend on the function."""
    if impl == "reference":
        return 4 * N * V * (FUNCTION_BUFFERS - 1)
    if reduction == "none":
        return 0
    return N * C * BYTES[dtype] + (4 * V * C if weight_grad else 0)


def scratch_bytes(
    impl: str, N: int, C: int, V: int, dtype: str, *, reduction: str = "sum", weight_grad: bool = True
) -> int:
    """Peak temporary bytes in addition to saved tensors and gradients."""
    rows = N if impl == "reference" else chunk_tokens(N, V)
    logits = rows * V * (4 * FUNCTION_BUFFERS + BYTES[dtype])
    added = 4 * V * C if weight_grad and reduction == "none" and impl == "chunked" else 0
    return logits + added
