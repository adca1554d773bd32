"""Stochastic rounding in torch: wrapping int32 arithmetic, in chunks that stay in a CPU's cache."""

# N elements of a flattened tensor

from __future__ import annotations

from collections.abc import Iterator

import torch

from trimtab.kernels.stochastic_rounding.spec import CHUNK, GOLDEN, MULTIPLIERS, SHIFTS, keys

INFINITY = 0x7F800000
QUIET_BIT = 0x00400000
EXPONENT_STEP = 0x00800000


def _signed(word: int) -> int:
    """The int32 with the bits of an unsigned 32-bit word: torch's int32 wraps, its uint32 lacks shifts."""
    word &= 0xFFFFFFFF
    return word - (1 << 32) if word >= 1 << 31 else word


def _xorshift_(h_N: torch.Tensor, shift: int, scratch_N: torch.Tensor) -> None:
    # int32 shifts are arithmetic: the mask clears the copies of the sign bit
    torch.bitwise_right_shift(h_N, shift, out=scratch_N)
    h_N.bitwise_xor_(scratch_N.bitwise_and_((1 << (32 - shift)) - 1))


def _hash_(h_N: torch.Tensor, key0: int, key1: int | torch.Tensor, scratch_N: torch.Tensor) -> torch.Tensor:
    """Low words of element indices → hashed words, in place. `spec.word` is the definition."""
    h_N.bitwise_xor_(_signed(key0))
    _xorshift_(h_N, SHIFTS[0], scratch_N)
    h_N.mul_(_signed(MULTIPLIERS[0]))
    _xorshift_(h_N, SHIFTS[1], scratch_N)
    h_N.add_(_signed(key1) if isinstance(key1, int) else key1)
    h_N.mul_(_signed(MULTIPLIERS[1]))
    _xorshift_(h_N, SHIFTS[2], scratch_N)
    h_N.mul_(_signed(MULTIPLIERS[2]))
    _xorshift_(h_N, SHIFTS[3], scratch_N)
    return h_N


def _hashed_chunks(
    count: int, offset: int, key0: int, key1: int, device: torch.device
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yields the words of each chunk, in a buffer that the next one overwrites; none crosses a multiple of 2³²."""
    size = min(count, CHUNK["cpu" if device.type == "cpu" else "cuda"])
    ramp_N = torch.arange(size, dtype=torch.int32, device=device)
    words_N, scratch_N = torch.empty_like(ramp_N), torch.empty_like(ramp_N)
    start = 0
    while start < count:
        low, high = (offset + start) & 0xFFFFFFFF, (offset + start) >> 32
        length = min(size, count - start, (1 << 32) - low)
        torch.add(ramp_N[:length], _signed(low), out=words_N[:length])
        yield (
            slice(start, start + length),
            _hash_(words_N[:length], key0, key1 + high * GOLDEN, scratch_N[:length]),
        )
        start += length


def _round_bits(value_N: torch.Tensor, fraction_N: torch.Tensor) -> torch.Tensor:
    """fp32 bits and random 16-bit fractions (overwritten) → bf16 bits, both as int32.

    Masks by arithmetic shift: on a CPU `isfinite` and `where` alone would take as long as everything else.
    """
    size_N = value_N.bitwise_and(0x7FFFFFFF)
    finite_N = size_N.sub(INFINITY).bitwise_right_shift_(31)  # all ones where finite, else zero
    nan_N = size_N.neg().add_(INFINITY).bitwise_right_shift_(31)
    # a NaN whose payload is in the lower half only would be truncated to infinity: set the quiet bit
    size_N.bitwise_or_(nan_N.bitwise_and_(QUIET_BIT)).add_(fraction_N.bitwise_and_(finite_N))
    # finite values stay finite: clamp to the largest below infinity
    limit_N = finite_N.bitwise_and_(-EXPONENT_STEP).add_(0x7FFFFFFF)
    torch.minimum(size_N, limit_N, out=size_N)
    return size_N.bitwise_or_(value_N.bitwise_and(-(1 << 31))).bitwise_right_shift_(16)


def random_bits(
    count: int,
    *,
    seed: int,
    step: int,
    param_index: int,
    stream: int = 0,
    offset: int = 0,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Hashed words as int32 [count]."""
    out_N = torch.empty(count, dtype=torch.int32, device=device)
    for where, words in _hashed_chunks(count, offset, *keys(seed, step, param_index, stream), out_N.device):
        out_N[where] = words
    return out_N


def random_bits_at(
    index_N: torch.Tensor, *, seed: int, step: int, param_index: int, stream: int = 0
) -> torch.Tensor:
    """Hashed words as int32, of int64 indices in any order and shape."""
    key0, key1 = keys(seed, step, param_index, stream)
    words_N, scratch_N = index_N.to(torch.int32), torch.empty_like(index_N, dtype=torch.int32)
    high_N = (index_N >> 32).to(torch.int32).mul_(_signed(GOLDEN)).add_(_signed(key1))
    return _hash_(words_N, key0, high_N, scratch_N)


def round_with_(out_N: torch.Tensor, value_N: torch.Tensor, words_N: torch.Tensor) -> torch.Tensor:
    """Rounds `value_N` into bf16 `out_N` by the low halves of int32 `words_N`; `words_N` is overwritten."""
    rounded_N = _round_bits(value_N.contiguous().view(torch.int32), words_N.bitwise_and_(0xFFFF))
    out_N.view(torch.int16).copy_(rounded_N)
    return out_N


def stochastic_round_(
    out_N: torch.Tensor,
    value_N: torch.Tensor,
    *,
    seed: int,
    step: int,
    param_index: int,
    stream: int = 0,
    offset: int = 0,
) -> torch.Tensor:
    """See `trimtab.kernels.stochastic_rounding`.

    The lower 16 bits of the fp32 value are its distance from the bf16 neighbour closer to zero, as a fraction of the
    spacing: random bits are added to them, and the sum is truncated.
    """
    assert (out_N.dtype, value_N.dtype) == (torch.bfloat16, torch.float32), (out_N.dtype, value_N.dtype)
    assert out_N.shape == value_N.shape, (out_N.shape, value_N.shape)
    assert out_N.is_contiguous(), out_N.stride()
    key0, key1 = keys(seed, step, param_index, stream)
    out_flat_N, value_flat_N = out_N.view(-1), value_N.reshape(-1)
    for where, bits in _hashed_chunks(out_flat_N.numel(), offset, key0, key1, out_N.device):
        rounded = _round_bits(value_flat_N[where].view(torch.int32), bits.bitwise_and_(0xFFFF))
        out_flat_N[where].view(torch.int16).copy_(rounded)
    return out_N
