"""The AdamW step in Triton: one launch over a table of tensors, each element read and written once.

The operations are those of `impl_reference.py` with three fused multiply-adds (README.md); the launch forbids others.
torch's kernels may round differently in the last bit, depending on torch's version.
"""

# a record describes a tensor, a tile is `SIZE` elements of it; a program updates `TIMES` tiles

from __future__ import annotations

import triton
import triton.language as tl

from trimtab.kernels.stochastic_rounding.impl_triton import hashed_low, nearest_bits, rounded_bits, second_key


@triton.jit
def _load(place, mask):  # type: ignore[no-untyped-def]
    """Loads as fp32; bf16 is passed as uint16, its bits being the upper half of fp32's."""
    value = tl.load(place, mask=mask, other=0)
    if place.dtype.element_ty == tl.uint16:
        return (value.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return value.to(tl.float32)


@triton.jit
def _store(place, value, mask, start, low, key, STOCHASTIC: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stores fp32, or rounds to bf16 with the random bits of `key`."""
    if place.dtype.element_ty != tl.uint16:
        tl.store(place, value, mask=mask)
    elif STOCHASTIC:
        word = hashed_low(low, key, second_key(start, key >> 32))
        tl.store(place, rounded_bits(value, word).to(tl.uint16), mask=mask)
    else:
        tl.store(place, nearest_bits(value).to(tl.uint16), mask=mask)


@triton.jit(do_not_specialize=["number", "one_grad", "one_hyper", "one_key", "one_key1", "one_key2"])
def _adamw_kernel(  # type: ignore[no-untyped-def]
    tile_ptr, record_ptr, live_ptr, number, one_grad, one_hyper, one_key, one_key1, one_key2,
    scale_ptr, skip_ptr, pull, beta2, rest2, inverse_root, eps,
    WEIGHT: tl.constexpr, MOMENT: tl.constexpr, GRAD: tl.constexpr, ALIGNED: tl.constexpr,
    NEAR: tl.constexpr, STOCHASTIC: tl.constexpr,
    SIZE: tl.constexpr, TIMES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Record: weight, exp_avg, exp_avg_sq, elements. NEAR: which formula torch's lerp uses."""
    if skip_ptr is not None:  # noqa: SIM102  (decided at compile time, the next one not)
        if tl.load(skip_ptr) != 0:
            return
    tile = tl.load(tile_ptr + tl.program_id(0))
    tensor = tile & 0x7FFFFFFF
    if live_ptr is None:  # one tensor, as in `OptimizerInBackward`: its values are arguments
        grad_address, hyper = one_grad.to(tl.int64), one_hyper.to(tl.int64)
        key, key1, key2 = one_key.to(tl.int64), one_key1.to(tl.int64), one_key2.to(tl.int64)
    else:
        live = live_ptr + tensor
        grad_address, hyper = tl.load(live), tl.load(live + number)
        key, key1, key2 = (
            tl.load(live + 2 * number),
            tl.load(live + 3 * number),
            tl.load(live + 4 * number),
        )
    if grad_address == 0:
        return  # no gradient in this step
    rate = hyper.to(tl.int32).to(tl.float32, bitcast=True)
    decay = (hyper >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    record = record_ptr + tensor * 4
    weight_ptr = tl.load(record).to(tl.pointer_type(WEIGHT))
    first_ptr = tl.load(record + 1).to(tl.pointer_type(MOMENT))
    second_ptr = tl.load(record + 2).to(tl.pointer_type(MOMENT))
    grad_ptr = grad_address.to(tl.pointer_type(GRAD))
    count = tl.load(record + 3)
    if ALIGNED:  # the compiler cannot know the alignment of addresses from a table: with this it loads 16 bytes at once
        weight_ptr, grad_ptr = tl.multiple_of(weight_ptr, 16), tl.multiple_of(grad_ptr, 16)
        first_ptr, second_ptr = tl.multiple_of(first_ptr, 16), tl.multiple_of(second_ptr, 16)
        count = tl.multiple_of(count, 8)
    grad_scale = tl.load(scale_ptr)
    begin = (tile >> 32) * SIZE
    times = tl.minimum(TIMES, tl.cdiv(count - begin, SIZE))
    for i in tl.range(0, times, num_stages=STAGES):
        start = begin + i * SIZE
        lane = tl.arange(0, SIZE)
        index = start + lane
        mask = index < count
        weight_at, first_at, second_at = weight_ptr + index, first_ptr + index, second_ptr + index
        grad = _load(grad_ptr + index, mask) * grad_scale
        first, second, weight = _load(first_at, mask), _load(second_at, mask), _load(weight_at, mask)

        if NEAR:
            first = tl.fma(pull, grad - first, first)
        else:
            first = tl.fma(pull, (grad - first) * -1.0, grad)
        second = tl.fma(rest2, grad * grad, second * beta2)
        denominator = tl.sqrt_rn(second) * inverse_root + eps
        weight = tl.fma(rate, tl.div_rn(first, denominator), weight * decay)

        low = (start & 0xFFFFFFFF).to(tl.uint32) + lane.to(tl.uint32)  # no tile crosses a multiple of 2³²
        _store(weight_at, weight, mask, start, low, key, STOCHASTIC)
        _store(first_at, first, mask, start, low, key1, STOCHASTIC)
        _store(second_at, second, mask, start, low, key2, STOCHASTIC)
