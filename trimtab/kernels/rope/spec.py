"""What rotary positions are tested on, how they are laid out on a chip, and what they cost; no torch at import."""

# N = B · T tokens, H query heads, K key heads, D head size, F = D / 2 frequencies

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trimtab.facts.dtypes import BYTES, TORCH_NAMES
from trimtab.kernels.rms_norm.spec import programs

if TYPE_CHECKING:
    import torch

IMPLS = ("reference", "triton")

TILE, WARPS = 1024, 4
"""Pairs of numbers in a tile: 8 a thread. With eight warps the normed backward takes 141 µs instead of 96 (16,384
tokens, 16/8 heads of 128, H200); tiles of 2048 are no faster, and spill on Blackwell with heads of 256."""


@dataclass(frozen=True)
class Configuration:
    """How a kernel is laid out: heads and frequencies of a tile, warps, programs (of the normed backward)."""

    heads: int
    frequencies: int
    warps: int
    programs: int


def configuration(heads: int, D: int, capability: int) -> Configuration:
    """Of a token's heads, as many at once as make a tile.

    Example:
        >>> configuration(32, 128, 90)
        Configuration(heads=16, frequencies=64, warps=4, programs=264)
    """
    frequencies = max(1 << (D // 2 - 1).bit_length(), 8)
    rows = min(1 << (heads - 1).bit_length(), max(TILE // frequencies, 1))
    return Configuration(rows, frequencies, WARPS, programs(capability))


@dataclass(frozen=True)
class Case:
    """One shape to be right on."""

    name: str
    B: int
    T: int
    H: int
    K: int
    D: int
    norm: bool = False


CASES = (
    Case("plain", B=2, T=5, H=4, K=2, D=16),
    Case("plain with norms", B=2, T=5, H=4, K=2, D=16, norm=True),
    Case("the smallest", B=1, T=1, H=1, K=1, D=2),
    Case("odd", B=1, T=3, H=9, K=3, D=80),
    Case("odd with norms", B=3, T=3, H=9, K=3, D=96, norm=True),
    Case("more heads than a tile", B=1, T=2, H=20, K=20, D=256, norm=True),
    Case("no tokens", B=1, T=0, H=2, K=1, D=8),
    Case("no tokens with norms", B=1, T=0, H=2, K=1, D=8, norm=True),
)
LARGE_CASES = (
    Case("16384 tokens, 32/8 of 128", B=4, T=4096, H=32, K=8, D=128),
    Case("16384 tokens, 16/8 of 128, norms", B=4, T=4096, H=16, K=8, D=128, norm=True),
    Case("16384 tokens, 9/3 of 64", B=8, T=2048, H=9, K=3, D=64),
)
"""For a GPU; also timed."""


def make_inputs(case: Case, dtype: str, device: str = "cpu", seed: int = 0) -> dict[str, torch.Tensor]:
    """q, k, cos, sin and, where the case has norms, q_weight and k_weight; positions start anew in each row."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def place(x: torch.Tensor) -> torch.Tensor:
        return x.bfloat16().to(getattr(torch, TORCH_NAMES[dtype]))

    B, T, D = case.B, case.T, case.D
    inverse_F = 10_000.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    angles_BTF = (torch.arange(T)[None, :, None] + 3 * torch.arange(B)[:, None, None]) * inverse_F
    wide = torch.float64 if dtype == "fp64" else torch.float32
    inputs = {
        "q": place(draw(B, T, case.H, D)),
        "k": place(draw(B, T, case.K, D)),
        # rounded to fp32 in every dtype, so that fp64 truth starts from the same numbers
        "cos": angles_BTF.cos().float().to(device, wide),
        "sin": angles_BTF.sin().float().to(device, wide),
    }
    if case.norm:
        inputs |= {"q_weight": place(1 + 0.3 * draw(D)), "k_weight": place(1 + 0.3 * draw(D))}
    return inputs


def flops(N: int, H: int, K: int, D: int, *, norm: bool = False, backward: bool = False) -> int:
    """Three a number for turning; four more forward and twelve more backward for the norm."""
    return N * (H + K) * D * (3 + (12 if backward else 4) * norm)


def bytes_moved(
    N: int, H: int, K: int, D: int, dtype: str, *, norm: bool = False, backward: bool = False
) -> int:
    """The least: heads read and written once (read twice for the normed backward), cosines and sines."""
    tensors = 3 if norm and backward else 2
    return tensors * N * (H + K) * D * BYTES[dtype] + 4 * N * D


def saved_bytes(N: int, H: int, K: int, D: int, dtype: str, *, norm: bool = False) -> int:
    """Kept for the backward beyond cosines and sines, which all layers share: the heads before a norm."""
    return N * (H + K) * D * BYTES[dtype] if norm else 0


def scratch_bytes(D: int, *, norm: bool = False, capability: int = 90) -> int:
    """The programs' parts of both weights' gradients, in the backward."""
    return 2 * 4 * D * programs(capability) if norm else 0
