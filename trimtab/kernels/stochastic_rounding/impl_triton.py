"""Stochastic rounding in Triton. `hashed_word` is the device function that other kernels share."""

# N elements of a flattened tensor

from __future__ import annotations

import torch
import triton
import triton.language as tl

from trimtab.kernels.stochastic_rounding.spec import keys

BLOCK = 1024


def _signed(word: int) -> int:
    # always an i32 argument; beyond 2³¹ it would arrive as i64 and compile a second kernel
    return word - (1 << 32) if word >= 1 << 31 else word


@triton.jit
def hashed_low(low, key0, key1):  # type: ignore[no-untyped-def]
    """uint32 words of the low halves of element indices; `key1` is `second_key` of their high half."""
    h = low ^ key0.to(tl.uint32)
    h ^= h >> 17
    h *= tl.full((), 0xED5AD4BB, tl.uint32)
    h ^= h >> 11
    h += key1
    h *= tl.full((), 0xAC4C1B51, tl.uint32)
    h ^= h >> 15
    h *= tl.full((), 0x31848BAB, tl.uint32)
    return h ^ (h >> 14)


@triton.jit
def second_key(index, key1):  # type: ignore[no-untyped-def]
    """The second key of int64 element indices, which their high half changes."""
    return key1.to(tl.uint32) + (index >> 32).to(tl.uint32) * tl.full((), 0x9E3779B9, tl.uint32)


@triton.jit
def hashed_word(index, key0, key1):  # type: ignore[no-untyped-def]
    """uint32 words of int64 element indices; keys are from `spec.keys`. Equal to `spec.word` bit for bit."""
    return hashed_low((index & 0xFFFFFFFF).to(tl.uint32), key0, second_key(index, key1))


@triton.jit
def rounded_bits(value, word):  # type: ignore[no-untyped-def]
    """The int16 that holds the bf16 of an fp32 `value`, rounded with the low half of `word`."""
    bits = value.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # nothing is added to values above the largest bf16, which stay finite, nor to inf and NaN
    up = tl.where(size <= 0x7F7F0000, (word & 0xFFFF).to(tl.int32), 0)
    # a NaN gets its quiet bit set, so that one whose payload is in the low half stays NaN
    quiet = tl.where(size > 0x7F800000, 0x00400000, 0)
    return (((bits | quiet) + up) >> 16).to(tl.int16)


@triton.jit
def nearest_bits(value):  # type: ignore[no-untyped-def]
    """The int16 that holds the bf16 nearest to an fp32 `value`, ties to even; NaN is the hardware's 0x7FFF."""
    bits = value.to(tl.int32, bitcast=True)
    nearest = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FFF, nearest).to(tl.int16)


# not specialised: a key or an offset that happens to be 1 would become a constant and trigger a recompilation
@triton.jit(do_not_specialize=["count", "offset", "key0", "key1"])
def _round_kernel(out_ptr, value_ptr, count, offset, key0, key1, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = position < count
    value = tl.load(value_ptr + position, mask=inside, other=0.0)
    word = hashed_word(position + offset, key0, key1)
    tl.store(out_ptr + position, rounded_bits(value, word), mask=inside)


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

    The output is written through an int16 view: a cast to bf16 would round a second time.
    """
    assert (out_N.dtype, value_N.dtype) == (torch.bfloat16, torch.float32), (out_N.dtype, value_N.dtype)
    assert out_N.shape == value_N.shape, (out_N.shape, value_N.shape)
    assert out_N.is_contiguous(), out_N.stride()
    count = out_N.numel()
    if count:
        key0, key1 = keys(seed, step, param_index, stream)
        _round_kernel[(triton.cdiv(count, BLOCK),)](
            out_N.view(torch.int16),
            value_N.contiguous(),
            count,
            offset,
            _signed(key0),
            _signed(key1),
            BLOCK=BLOCK,
        )
    return out_N
