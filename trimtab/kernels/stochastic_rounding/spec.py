"""Definition, test cases and costs of stochastic rounding; does not import torch.

The hash is defined here in Python integers; the torch and Triton versions must be bitwise identical.
"""

from __future__ import annotations

from typing import Any

IMPLS = ("reference", "triton")

# triple32 (Chris Wellons, "Prospecting for Hash Functions"): the 32-bit finalizer with the lowest known bias
# of those with three multiplications, 0.0208 against 0.106 of murmur3's and 0.174 of two rounds.
MULTIPLIERS = (0xED5AD4BB, 0xAC4C1B51, 0x31848BAB)
SHIFTS = (17, 11, 15, 14)
GOLDEN = 0x9E3779B9  # spreads the high word of an element index (tensors beyond 2³² elements)

_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF

BYTES_MOVED = 6  # per element: 4 read, 2 written; the bits are computed, not stored
CHUNK = {"cpu": 1 << 18, "cuda": 1 << 22}
"""Elements per chunk. On one core 2¹⁸ takes 3.5 ns per element, 2¹⁶ 4.5 and 2¹⁴ 8.9: calls into torch cost more than
leaving the cache. On a GPU it bounds the temporary memory."""

CASES: tuple[tuple[int, ...], ...] = ((0,), (1,), (7,), (255, 3), (300, 257), ((1 << 18) + 3, 2))
"""Shapes of the tests: empty, tiny, odd, and longer than one chunk."""


def keys(seed: int, step: int, param_index: int, stream: int = 0) -> tuple[int, int]:
    """Two 32-bit keys from the values that are constant within a tensor (splitmix64, chained).

    Example:
        >>> keys(0, 1, 2) == keys(0, 1, 2), keys(0, 1, 2) == keys(0, 2, 1)
        (True, False)
    """
    state = 0
    for part in (seed, step, param_index, stream):
        state = (state ^ (part & _MASK64)) + 0x9E3779B97F4A7C15 & _MASK64
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
        state ^= state >> 31
    return state & _MASK32, state >> 32


def word(key0: int, key1: int, index: int) -> int:
    """The 32-bit word of one element: the definition, in Python integers.

    The second key is used between the multiplications: if only `index ^ key0` depended on the keys, two steps would
    draw the same sequence in another order.
    """
    h = (index & _MASK32) ^ key0
    h ^= h >> SHIFTS[0]
    h = h * MULTIPLIERS[0] & _MASK32
    h ^= h >> SHIFTS[1]
    h = h + key1 + (index >> 32) * GOLDEN & _MASK32
    h = h * MULTIPLIERS[1] & _MASK32
    h ^= h >> SHIFTS[2]
    h = h * MULTIPLIERS[2] & _MASK32
    return h ^ (h >> SHIFTS[3])


def make_inputs(case: tuple[int, ...], *, seed: int = 0, device: str = "cpu") -> dict[str, Any]:
    """fp32 values of `case`'s shape over 60 octaves, both signs, and a bf16 tensor to write to."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(case, generator=generator)
    value = value * torch.exp2(torch.randint(-30, 30, case, generator=generator).float())
    return {"out_N": torch.empty(case, dtype=torch.bfloat16, device=device), "value_N": value.to(device)}
