"""Test cases, launch configurations per GPU and costs of RoPE; does not import torch."""

# N = B · T tokens, H query heads, K key heads, D head size, R rotated elements per head, F = R / 2 frequencies

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trimtab.facts.dtypes import BYTES, TORCH_NAMES
from trimtab.kernels.rms_norm.spec import programs

if TYPE_CHECKING:
    import torch

IMPLS = ("reference", "triton")

TILE, WARPS = 1024, 4
"""Pairs per tile: 8 per thread. With eight warps the backward with norms takes 141 µs instead of 96 (16,384
tokens, 16/8 heads of 128, H200); tiles of 2048 are no faster, and spill on Blackwell with heads of 256."""


@dataclass(frozen=True)
class Configuration:
    """Launch configuration: heads and pairs (frequencies) of a tile, warps, programs (of the backward with norms)."""

    heads: int
    frequencies: int
    warps: int
    programs: int


def configuration(heads: int, D: int, capability: int, *, all_heads: bool = False) -> Configuration:
    """Launch configuration for a token's heads: as many heads per tile as fit, or all of them where one norm is over
    all heads, with the same number of pairs per thread, up to 16 warps.

    Example:
        >>> configuration(32, 128, 90)
        Configuration(heads=16, frequencies=64, warps=4, programs=264)
        >>> configuration(32, 128, 90, all_heads=True)
        Configuration(heads=32, frequencies=64, warps=8, programs=264)
    """
    frequencies = max(1 << (D // 2 - 1).bit_length(), 8)
    if all_heads:
        rows = 1 << (heads - 1).bit_length()
        warps = min(max(rows * frequencies * WARPS // TILE, WARPS), 16)
        return Configuration(rows, frequencies, warps, programs(capability))
    rows = min(1 << (heads - 1).bit_length(), max(TILE // frequencies, 1))
    return Configuration(rows, frequencies, WARPS, programs(capability))


@dataclass(frozen=True)
class Case:
    """Sizes and arguments of a test."""

    name: str
    B: int
    T: int
    H: int
    K: int
    D: int
    norm: bool = False
    offset: float = 0.0
    all_heads: bool = False
    R: int | None = None
    interleaved: bool = False


CASES = (
    Case("plain", B=2, T=5, H=4, K=2, D=16),
    Case("plain with norms", B=2, T=5, H=4, K=2, D=16, norm=True),
    Case("smallest sizes", B=1, T=1, H=1, K=1, D=2),
    Case("odd", B=1, T=3, H=9, K=3, D=80),
    Case("odd with norms", B=3, T=3, H=9, K=3, D=96, norm=True),
    Case("more heads than a tile", B=1, T=2, H=20, K=20, D=256, norm=True),
    Case("no tokens", B=1, T=0, H=2, K=1, D=8),
    Case("no tokens with norms", B=1, T=0, H=2, K=1, D=8, norm=True),
)
OPTION_CASES = (
    Case("norms with an offset", B=2, T=5, H=4, K=2, D=16, norm=True, offset=1.0),
    Case("one norm over all heads", B=2, T=5, H=4, K=2, D=16, norm=True, all_heads=True),
    Case(
        "one norm over all heads, odd sizes", B=1, T=3, H=9, K=3, D=96, norm=True, all_heads=True, offset=1.0
    ),
    Case("partial", B=2, T=5, H=4, K=2, D=16, R=8),
    Case("partial, a quarter and odd", B=1, T=3, H=9, K=3, D=80, R=22),
    Case("partial with norms", B=3, T=3, H=3, K=1, D=96, R=72, norm=True, offset=1.0),
    Case("interleaved", B=2, T=5, H=4, K=2, D=16, interleaved=True),
    Case("interleaved with norms", B=2, T=5, H=4, K=2, D=12, norm=True, interleaved=True),
    Case("interleaved, partial", B=1, T=3, H=9, K=3, D=80, R=40, interleaved=True),
    Case(
        "interleaved, partial, one pair",
        B=1,
        T=3,
        H=2,
        K=1,
        D=20,
        R=2,
        norm=True,
        offset=1.0,
        interleaved=True,
    ),
    Case(
        "all options", B=2, T=3, H=5, K=3, D=24, R=16, norm=True, offset=1.0, all_heads=True, interleaved=True
    ),
    Case("all options, not interleaved", B=2, T=3, H=5, K=3, D=24, R=16, norm=True, all_heads=True),
    Case("one norm over all heads, no tokens", B=1, T=0, H=2, K=1, D=8, norm=True, all_heads=True),
)
LARGE_CASES = (
    Case("16384 tokens, 32/8 of 128", B=4, T=4096, H=32, K=8, D=128),
    Case("16384 tokens, 16/8 of 128, norms", B=4, T=4096, H=16, K=8, D=128, norm=True),
    Case("16384 tokens, 9/3 of 64", B=8, T=2048, H=9, K=3, D=64),
)
"""For a GPU; also timed."""
LARGE_OPTION_CASES = (
    Case("16384 tokens, 32/8 of 128, all heads", B=4, T=4096, H=32, K=8, D=128, norm=True, all_heads=True),
    Case("4096 tokens, 40/8 of 128, all heads", B=1, T=4096, H=40, K=8, D=128, norm=True, all_heads=True),
    Case("16384 tokens, 32/2 of 128, GLM", B=4, T=4096, H=32, K=2, D=128, R=64, interleaved=True),
    Case("16384 tokens, 24/8 of 128, partial", B=4, T=4096, H=24, K=8, D=128, R=96),
    Case("4096 tokens, 8/4 of 256, offset", B=1, T=4096, H=8, K=4, D=256, norm=True, offset=1.0),
    Case("4096 tokens, interleaved, norms", B=1, T=4096, H=16, K=8, D=128, norm=True, interleaved=True),
)
"""For a GPU."""


def make_inputs(case: Case, dtype: str, device: str = "cpu", seed: int = 0) -> dict[str, torch.Tensor]:
    """q, k, cos, sin and, where the case has norms, q_weight and k_weight; positions restart in each row."""
    import torch

    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def to_dtype(x: torch.Tensor) -> torch.Tensor:
        return x.bfloat16().to(getattr(torch, TORCH_NAMES[dtype]))

    B, T, D, R = case.B, case.T, case.D, case.R or case.D
    inverse_F = 10_000.0 ** (-torch.arange(0, R, 2, dtype=torch.float64) / R)
    angles_BTF = (torch.arange(T)[None, :, None] + 3 * torch.arange(B)[:, None, None]) * inverse_F
    wide = torch.float64 if dtype == "fp64" else torch.float32
    inputs = {
        "q": to_dtype(draw(B, T, case.H, D)),
        "k": to_dtype(draw(B, T, case.K, D)),
        # rounded to fp32 in every dtype, so that the fp64 truth starts from the same values
        "cos": angles_BTF.cos().float().to(device, wide),
        "sin": angles_BTF.sin().float().to(device, wide),
    }
    if case.norm:
        for name, heads in (("q_weight", case.H), ("k_weight", case.K)):
            weight = 1 - case.offset + 0.3 * draw(heads * D if case.all_heads else D)
            inputs[name] = to_dtype(weight)
    return inputs


def flops(
    N: int, H: int, K: int, D: int, *, R: int | None = None, norm: bool = False, backward: bool = False
) -> int:
    """Three per rotated element; for the norm, four more per element in the forward and twelve in the backward."""
    return N * (H + K) * (3 * (R or D) + D * (12 if backward else 4) * norm)


def bytes_moved(
    N: int,
    H: int,
    K: int,
    D: int,
    dtype: str,
    *,
    R: int | None = None,
    norm: bool = False,
    backward: bool = False,
) -> int:
    """Lower bound: heads read and written once (read twice in the backward with norms), cosines and sines. The same for
    norms per head and over all heads, and for any rotary_dim: elements that pass through are copied too."""
    tensors = 3 if norm and backward else 2
    return tensors * N * (H + K) * D * BYTES[dtype] + 4 * N * (R or D)


def saved_bytes(N: int, H: int, K: int, D: int, dtype: str, *, norm: bool = False) -> int:
    """Bytes saved for the backward in addition to the shared cosines and sines: the heads before a norm."""
    return N * (H + K) * D * BYTES[dtype] if norm else 0


def scratch_bytes(
    D: int,
    *,
    norm: bool = False,
    capability: int = 90,
    H: int = 1,
    K: int = 1,
    all_heads: bool = False,
) -> int:
    """Bytes of partial sums of both weights' gradients, in the backward; H and K matter for a norm over all heads."""
    widths = (H + K) * D if all_heads else 2 * D
    return 4 * widths * programs(capability) if norm else 0
