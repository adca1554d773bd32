"""The 8-bit AdamW step in Triton: one launch over a table of tensors, each block of 256 read and written once.

`exact` does single IEEE operations in the order of impl_reference.py and is bitwise identical to it. Otherwise products
are fused with sums, and roots and quotients are the hardware's: the same values to a few units in the last
place, in two fifths of the instructions. The maths, and what was tried: README.md.
"""

# B blocks of a program, E elements of a block: 256, or fewer where blocks are short; a record describes a tensor, a
# tile is the work of a program; PART and E: spec.parts

from __future__ import annotations

import triton
import triton.language as tl

from trimtab.kernels.adamw8bit.spec import BLOCK, FIRST_LEVEL, GRID, TINY, TOP1, TOP2, peak
from trimtab.kernels.stochastic_rounding.impl_triton import hashed_word

PEAK1 = tl.constexpr(peak(TOP1))
PEAK2 = tl.constexpr(peak(TOP2))
LEAST = tl.constexpr(TINY)
LOWEST = tl.constexpr((2.0 * FIRST_LEVEL) ** 4)
ROUNDED = tl.constexpr(GRID)
# adding twice a level to these puts the code into the lowest byte
CODE1 = tl.constexpr(1.5 * 2**24 + 2 * TOP1)
CODE2 = tl.constexpr(1.5 * 2**24 - 2 * FIRST_LEVEL)
TWICE1 = tl.constexpr(2.0 * TOP1)
TWICE2 = tl.constexpr(2.0 * FIRST_LEVEL)
BF16_MAX = tl.constexpr(3.3895313892515355e38)
ONE = tl.constexpr(0x3F800000)
WIDTH = tl.constexpr(BLOCK)


@triton.jit
def _twice(codes, shift, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """2 · code + shift. With ASM a byte is placed into the bits of 2²³ + code, without a conversion."""
    if ASM:
        bits = tl.inline_asm_elementwise(
            """
            prmt.b32 $0, $4, 0x4B000000, 0x7440;
            prmt.b32 $1, $4, 0x4B000000, 0x7441;
            prmt.b32 $2, $4, 0x4B000000, 0x7442;
            prmt.b32 $3, $4, 0x4B000000, 0x7443;
            """,
            "=r,=r,=r,=r,r",
            [codes],
            dtype=tl.int32,
            is_pure=True,
            pack=4,
        )
        return bits.to(tl.float32, bitcast=True) * 2.0 + (shift - 16777216.0)
    return codes.to(tl.float32) * 2.0 + shift


@triton.jit
def _dither(word, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """8 · (i + ½)/2¹⁶ − 4 for the 16 bits i in the middle of a word, through a value in 8 … 16."""
    if ASM:
        bits = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, 0x007FFF80, 0x41000000, 0xEA;",
            "=r,r",
            [word],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        bits = (word & 0x007FFF80) | 0x41000000
    return bits.to(tl.float32, bitcast=True) - 11.99993896484375


@triton.jit
def _power(k):  # type: ignore[no-untyped-def]
    """0x915F77F5ᵏ mod 2³² for k in 0 … 7. k is constant per register, so this compiles to one factor."""
    factor = tl.where((k & 1) != 0, tl.full((), 0x915F77F5, tl.uint32), tl.full((), 1, tl.uint32))
    factor *= tl.where((k & 2) != 0, tl.full((), 0xCA0BB079, tl.uint32), tl.full((), 1, tl.uint32))
    return factor * tl.where((k & 4) != 0, tl.full((), 0x980C9931, tl.uint32), tl.full((), 1, tl.uint32))


@triton.jit
def _sign_of(x, size):  # type: ignore[no-untyped-def]
    """`size` (fp32 bits of a positive constant) with the sign of x: one instruction instead of two."""
    return ((x.to(tl.int32, bitcast=True) & -2147483648) | size).to(tl.float32, bitcast=True)


@triton.jit
def _divided(x, y, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """x / y for y ≥ 0. Two products with a hardware root: 3 instructions instead of 10, to 3e-7."""
    if EXACT:
        return tl.div_rn(x, y)
    inverse_root = tl.rsqrt(y)
    return x * inverse_root * inverse_root


@triton.jit
def _odd(size, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    """2L + 1 for the level L below a value: its fourth root to 1/128, truncated to an even number, plus 1."""
    if EXACT:
        root = tl.sqrt_rn(tl.sqrt_rn(size))
    else:
        root = tl.rsqrt(tl.rsqrt(size))
    even = ((root + ROUNDED).to(tl.int32, bitcast=True) & -256).to(tl.float32, bitcast=True)
    return even - (ROUNDED - 1.0)


@triton.jit
def _above(size, odd, dither):  # type: ignore[no-untyped-def]
    """Value minus threshold (without its −4)."""
    t = odd * odd + 1.0
    return size - t * ((dither * odd + 4.0) + t)


@triton.jit
def _encode_first(value, to_peak, dither, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    size = tl.abs(value * to_peak)
    odd = _odd(size, EXACT)
    twice = odd + _sign_of(_above(size, odd, dither) + 4.0, ONE)
    return (twice * _sign_of(value, ONE) + CODE1).to(tl.int32, bitcast=True).to(tl.uint8)


@triton.jit
def _encode_root(value, to_peak, dither, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    size = tl.maximum(value * to_peak, LOWEST)
    odd = _odd(size, EXACT)
    twice = odd + _sign_of(_above(size, odd, dither), ONE)
    return (twice + CODE2).to(tl.int32, bitcast=True).to(tl.uint8)


@triton.jit
def _largest(value):  # type: ignore[no-untyped-def]
    """Maximum of each block's values ≥ 0, [B, 1]. Compared as integers, so that NaN propagates."""
    return tl.max(value.to(tl.int32, bitcast=True), axis=1, keep_dims=True).to(tl.float32, bitcast=True)


@triton.jit
def _updated(weight, first, root, rate, decay, correction, eps, EXACT: tl.constexpr):  # type: ignore[no-untyped-def]
    if EXACT:
        return weight * decay - tl.div_rn(first, root * correction + eps) * rate
    # the learning rate goes into the denominator, where it is free; a rate of 0 has no reciprocal and updates nothing
    inverse_rate = 1.0 / tl.maximum(rate, 1e-30)
    update = _divided(first, root * (correction * inverse_rate) + eps * inverse_rate, EXACT)
    return weight * decay - tl.where(rate == 0.0, 0.0, update)


@triton.jit
def _load(place, mask, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Loads as fp32; bf16 is passed as uint16, its bits being the upper half of fp32's."""
    value = tl.load(place, mask=mask, other=0)
    if place.dtype.element_ty == tl.uint16:
        if ASM:
            bits = tl.inline_asm_elementwise(
                "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xFFFF0000;", "=r,=r,r", [value],
                dtype=tl.int32, is_pure=True, pack=2,
            )  # fmt: skip
            return bits.to(tl.float32, bitcast=True)
        return (value.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return value.to(tl.float32)


@triton.jit
def _bf16_bits(value, word, STOCHASTIC: tl.constexpr):  # type: ignore[no-untyped-def]
    """uint16 bits of fp32 rounded with the upper half of `word`, or to nearest even. NaN and inf are unchanged."""
    bits = value.to(tl.uint32, bitcast=True)
    if STOCHASTIC:
        up = tl.where(tl.abs(value) <= BF16_MAX, word >> 16, 0)
    else:
        up = tl.where(value == value, 0x7FFF + ((bits >> 16) & 1), 0)
    return ((bits + up) >> 16).to(tl.uint16)


@triton.jit
def _number_of_blocks(all_blocks, columns, PART: tl.constexpr):  # type: ignore[no-untyped-def]
    """Number of a tensor's blocks in a part. It fits into 32 bits, where a division is short, except for "all"."""
    if PART == "all":
        return all_blocks
    else:
        full = (columns - 1) // WIDTH
        rows = all_blocks.to(tl.int32) // (full + 1)
        return rows * full if PART == "full" else rows


@triton.jit
def _blocks_of(first, num_blocks, columns, B: tl.constexpr, E: tl.constexpr, PART: tl.constexpr):  # type: ignore[no-untyped-def]
    """Place of the scale, first element and number of elements of B blocks, [B, 1]; 0 elements after the last block."""
    if PART == "all":  # block i begins at element E · i
        block = first + tl.arange(0, B)[:, None].to(tl.int64)
        inside = block < num_blocks
        return block, first * E + tl.arange(0, B)[:, None] * E, tl.where(inside, E, 0)
    else:
        block = first.to(tl.int32) + tl.arange(0, B)[:, None]
        inside = block < num_blocks
        full = (columns - 1) // WIDTH
        if PART == "full":
            row = (block.to(tl.uint32) // full.to(tl.uint32)).to(tl.int32)
            place, length = block - row * full, tl.where(inside, E, 0)
        else:
            row, place, length = block, full, tl.where(inside, columns - full * WIDTH, 0)
        return row.to(tl.int64) * (full + 1) + place, row.to(tl.int64) * columns + place * WIDTH, length


@triton.jit
def _live(live_ptr, number, tensor, one_grad, one_key, one_hyper):  # type: ignore[no-untyped-def]
    """The values that change with the step: the gradient's address, the random key, learning rate, weight decay.
    Without a list of them the launch is for one tensor, and they are arguments."""
    if live_ptr is None:
        grad, key, hyper = one_grad.to(tl.int64), one_key.to(tl.int64), one_hyper.to(tl.int64)
    else:
        grad = tl.load(live_ptr + tensor)
        key = tl.load(live_ptr + number + tensor)
        hyper = tl.load(live_ptr + 2 * number + tensor)
    rate = hyper.to(tl.int32).to(tl.float32, bitcast=True)
    decay = (hyper >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return grad, key, rate, decay


@triton.jit(do_not_specialize=["number", "one_grad", "one_key", "one_hyper"])
def _step8_kernel(  # type: ignore[no-untyped-def]
    tile_ptr, record_ptr, live_ptr, number, one_grad, one_key, one_hyper, scale_ptr, skip_ptr,
    beta1, beta2_root, rest1, rest2_root, correction, eps,
    WEIGHT: tl.constexpr, GRAD: tl.constexpr, PART: tl.constexpr, ALIGNED: tl.constexpr,
    STOCHASTIC: tl.constexpr, EXACT: tl.constexpr, ASM: tl.constexpr,
    B: tl.constexpr, E: tl.constexpr, TIMES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Tensors with 8-bit moments. Record: weight, codes1, scale1, codes2, scale2, blocks, columns, offset."""
    if skip_ptr is not None:  # noqa: SIM102  (decided at compile time, the next one not)
        if tl.load(skip_ptr) != 0:
            return
    tile = tl.load(tile_ptr + tl.program_id(0))
    tensor = tile & 0x7FFFFFFF
    record = record_ptr + tensor * 8
    grad_address, key, rate, decay = _live(live_ptr, number, tensor, one_grad, one_key, one_hyper)
    if grad_address == 0:
        return  # no gradient in this step
    weight_ptr = tl.load(record).to(tl.pointer_type(WEIGHT))
    codes1_ptr = tl.load(record + 1).to(tl.pointer_type(tl.uint8))
    codes2_ptr = tl.load(record + 3).to(tl.pointer_type(tl.uint8))
    grad_ptr = grad_address.to(tl.pointer_type(GRAD))
    columns = tl.load(record + 6).to(tl.int32)
    if ALIGNED:  # the compiler cannot know the alignment of addresses from a table: with this it loads 16 bytes at once
        weight_ptr, grad_ptr = tl.multiple_of(weight_ptr, 16), tl.multiple_of(grad_ptr, 16)
        codes1_ptr, codes2_ptr = tl.multiple_of(codes1_ptr, 16), tl.multiple_of(codes2_ptr, 16)
        columns = tl.multiple_of(columns, 8)
    scale1_ptr = tl.load(record + 2).to(tl.pointer_type(tl.float32))
    scale2_ptr = tl.load(record + 4).to(tl.pointer_type(tl.float32))
    num_blocks, offset = _number_of_blocks(tl.load(record + 5), columns, PART), tl.load(record + 7)
    grad_scale = tl.load(scale_ptr)
    factor1, factor2 = grad_scale * rest1, grad_scale * rest2_root
    across = tl.arange(0, E)[None, :]
    times = tl.minimum(TIMES, tl.cdiv(num_blocks - (tile >> 32), B))
    for i in tl.range(0, times, num_stages=STAGES):
        block, start, length = _blocks_of((tile >> 32) + i * B, num_blocks, columns, B, E, PART)
        inside = length > 0
        mask = across < length if PART == "last" else inside
        index = start + across
        weight_at, codes1_at, codes2_at = weight_ptr + index, codes1_ptr + index, codes2_ptr + index
        scale1_at, scale2_at = scale1_ptr + block, scale2_ptr + block
        grad = _load(grad_ptr + index, mask, ASM)
        codes1 = tl.load(codes1_at, mask=mask, other=127)
        codes2 = tl.load(codes2_at, mask=mask, other=0)
        weight = _load(weight_at, mask, ASM)
        unit1 = tl.load(scale1_at, mask=inside, other=0.0) * (1 / PEAK1) * beta1
        unit2 = tl.load(scale2_at, mask=inside, other=0.0) * (1 / PEAK2) * beta2_root

        level1, level2 = _twice(codes1, -TWICE1, ASM), _twice(codes2, TWICE2, ASM)
        square1, square2 = level1 * tl.abs(level1), level2 * level2
        first = square1 * tl.abs(square1) * unit1 + grad * factor1
        decayed, scaled_grad = square2 * square2 * unit2, grad * factor2
        second = decayed * decayed + scaled_grad * scaled_grad
        if (
            PART == "last"
        ):  # elements past the end of a row do not decode to zero, and must not be the maximum
            second = tl.where(mask, second, 0.0)
        root = tl.sqrt_rn(second) if EXACT else tl.sqrt(second)

        word = hashed_word((offset + start) + (across & -8), key, key >> 32) * _power(across & 7)
        dither = _dither(word, ASM)
        largest1, largest2 = _largest(tl.abs(first)), _largest(root)
        to_peak1 = _divided(tl.full((), PEAK1, tl.float32), tl.maximum(largest1, LEAST), EXACT)
        to_peak2 = _divided(tl.full((), PEAK2, tl.float32), tl.maximum(largest2, LEAST), EXACT)
        tl.store(codes1_at, _encode_first(first, to_peak1, dither, EXACT), mask=mask)
        tl.store(codes2_at, _encode_root(root, to_peak2, dither, EXACT), mask=mask)
        tl.store(scale1_at, tl.where(largest1 < LEAST, 0.0, largest1), mask=inside)
        tl.store(scale2_at, tl.where(largest2 < LEAST, 0.0, largest2), mask=inside)
        weight = _updated(weight, first, root, rate, decay, correction, eps, EXACT)
        if tl.uint16 == WEIGHT:
            tl.store(weight_at, _bf16_bits(weight, word, STOCHASTIC), mask=mask)
        else:
            tl.store(weight_at, weight, mask=mask)


@triton.jit(do_not_specialize=["number", "one_grad", "one_key", "one_hyper"])
def _step32_kernel(  # type: ignore[no-untyped-def]
    tile_ptr, record_ptr, live_ptr, number, one_grad, one_key, one_hyper, scale_ptr, skip_ptr,
    beta1, beta2, rest1, rest2_root, correction, eps,
    WEIGHT: tl.constexpr, GRAD: tl.constexpr, STOCHASTIC: tl.constexpr, EXACT: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Small tensors, moments in fp32. Record: weight, first, second, –, –, elements, –, offset."""
    if skip_ptr is not None:  # noqa: SIM102  (decided at compile time, the next one not)
        if tl.load(skip_ptr) != 0:
            return
    tile = tl.load(tile_ptr + tl.program_id(0))
    tensor = tile & 0x7FFFFFFF
    record = record_ptr + tensor * 8
    grad_address, key, rate, decay = _live(live_ptr, number, tensor, one_grad, one_key, one_hyper)
    if grad_address == 0:
        return
    index = (tile >> 32) + tl.arange(0, SIZE)
    mask = index < tl.load(record + 5)
    weight_at = tl.load(record).to(tl.pointer_type(WEIGHT)) + index
    first_at = tl.load(record + 1).to(tl.pointer_type(tl.float32)) + index
    second_at = tl.load(record + 2).to(tl.pointer_type(tl.float32)) + index
    grad = _load(grad_address.to(tl.pointer_type(GRAD)) + index, mask, False)
    grad_scale = tl.load(scale_ptr)
    first = tl.load(first_at, mask=mask, other=0.0) * beta1 + grad * (grad_scale * rest1)
    scaled_grad = grad * (grad_scale * rest2_root)
    second = tl.load(second_at, mask=mask, other=0.0) * beta2 + scaled_grad * scaled_grad
    tl.store(first_at, first, mask=mask)
    tl.store(second_at, second, mask=mask)
    root = tl.sqrt_rn(second) if EXACT else tl.sqrt(second)
    weight = _updated(_load(weight_at, mask, False), first, root, rate, decay, correction, eps, EXACT)
    if tl.uint16 == WEIGHT:
        word = hashed_word(tl.load(record + 7) + index, key, key >> 32)
        # the low half decides, as in `stochastic_rounding`, which these bits equal
        tl.store(weight_at, _bf16_bits(weight, word << 16, STOCHASTIC), mask=mask)
    else:
        tl.store(weight_at, weight, mask=mask)
