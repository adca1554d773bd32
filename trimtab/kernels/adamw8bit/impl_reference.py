"""The 8-bit AdamW step in torch, chunk by chunk so that little is decompressed at once."""

# R rows, C columns (last dimension), K blocks a row; _RC a chunk, _RKB the same padded to whole blocks of 256

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from trimtab.kernels.adamw8bit import State8bit
from trimtab.kernels.adamw8bit.code import SHIPPED, Code, Format
from trimtab.kernels.adamw8bit.spec import BLOCK, CHUNK, grid
from trimtab.kernels.adamw8bit.update import Kept, apply_, moments_
from trimtab.kernels.stochastic_rounding import random_bits, stochastic_round_

MOMENTS_STREAM = 1  # 0 rounds the weight
FLOAT32_TINY = torch.finfo(torch.float32).tiny


def new_state(param: torch.Tensor, fmt: Format = SHIPPED) -> State8bit:
    """Zero moments: zero scales, and the codes nearest to zero."""
    rows, _, blocks = grid(tuple(param.shape))
    codes1 = torch.full(param.shape, fmt.first.zero, dtype=torch.uint8, device=param.device)
    codes2 = torch.full(param.shape, fmt.second.zero, dtype=torch.uint8, device=param.device)
    scale1 = torch.zeros(rows, blocks, dtype=torch.float32, device=param.device)
    return State8bit(codes1, scale1, codes2, torch.zeros_like(scale1))


def _chunks(rows: int, columns: int, size: int) -> Iterator[tuple[slice, slice]]:
    """Whole rows, or whole blocks of one row: in both cases a contiguous run of elements."""
    if columns <= size:
        height = max(1, size // columns)
        for top in range(0, rows, height):
            yield slice(top, min(top + height, rows)), slice(0, columns)
        return
    for row in range(rows):
        for left in range(0, columns, size):
            yield slice(row, row + 1), slice(left, min(left + size, columns))


def _blocks(x_RC: torch.Tensor) -> torch.Tensor:
    """[R, C] → [R, K, 256], zeros behind a short last block."""
    short = -x_RC.shape[1] % BLOCK
    padded = F.pad(x_RC, (0, short)) if short else x_RC
    return padded.reshape(x_RC.shape[0], -1, BLOCK)


def _unblock(x_RKB: torch.Tensor, columns: int) -> torch.Tensor:
    return x_RKB.view(x_RKB.shape[0], -1)[:, :columns]


def _compress(
    value_RKB: torch.Tensor,
    fraction_RKB: torch.Tensor,
    code: Code,
    codes_RC: torch.Tensor,
    scale_RK: torch.Tensor,
) -> None:
    largest_RK = value_RKB.abs().amax(dim=-1)
    # a division, not a product with the reciprocal: the block's largest must become exactly ±1
    normal_RKB = value_RKB / largest_RK.clamp_min(FLOAT32_TINY).unsqueeze(-1)
    codes_RC.copy_(_unblock(code.encode(normal_RKB, fraction_RKB), codes_RC.shape[1]))
    scale_RK.copy_(largest_RK)


def _fractions(like_RC: torch.Tensor, where: dict[str, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Two numbers in (0, 1) an element, one from each half of a hashed word: (i + ½)/2¹⁶."""
    words_N = random_bits(like_RC.numel(), **where, stream=MOMENTS_STREAM, device=like_RC.device)
    low_N = words_N.bitwise_and(0xFFFF).float().add_(0.5).mul_(2.0**-16)
    high_N = words_N.bitwise_right_shift_(16).bitwise_and_(0xFFFF).float().add_(0.5).mul_(2.0**-16)
    return _blocks(low_N.view(like_RC.shape)), _blocks(high_N.view(like_RC.shape))


def _write_back(target_RC: torch.Tensor, weight_RKB: torch.Tensor, where: dict[str, Any] | None) -> None:
    if weight_RKB.data_ptr() == target_RC.data_ptr():
        return  # fp32 in whole blocks: the arithmetic was done in the parameter itself
    updated_RC = _unblock(weight_RKB, target_RC.shape[1])
    if target_RC.dtype == torch.bfloat16 and where is not None:
        stochastic_round_(target_RC, updated_RC, **where)
    else:
        target_RC.copy_(updated_RC)


def adamw8bit_step(
    param: torch.Tensor,
    grad: torch.Tensor,
    state: State8bit,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: torch.Tensor | float = 1.0,
    seed: int = 0,
    param_index: int = 0,
    stochastic_rounding: bool = True,
    offset: int = 0,
    skip: torch.Tensor | None = None,
    fmt: Format = SHIPPED,
) -> None:
    """See the door; `fmt` lets a study try other codes."""
    assert param.is_contiguous(), param.stride()
    assert param.shape == grad.shape, (param.shape, grad.shape)
    rows, columns, _ = grid(tuple(param.shape))
    if param.numel() == 0:
        return
    weight_RC, grad_RC = param.view(rows, columns), grad.reshape(rows, columns)
    codes1_RC, codes2_RC = state.codes1.view(rows, columns), state.codes2.view(rows, columns)
    size = CHUNK["cpu" if param.device.type == "cpu" else "cuda"]
    for down, across in _chunks(rows, columns, size):
        tiles = slice(across.start // BLOCK, -(-across.stop // BLOCK))
        codes1, codes2 = codes1_RC[down, across], codes2_RC[down, across]
        scale1, scale2 = state.scale1[down, tiles], state.scale2[down, tiles]
        target = weight_RC[down, across]
        kept = Kept([target, codes1, codes2, scale1, scale2], skip)
        gradient = _blocks(grad_RC[down, across].float() * grad_scale)
        first = fmt.first.decode(_blocks(codes1)).mul_(scale1.unsqueeze(-1))
        second = fmt.second.decode(_blocks(codes2)).mul_(scale2.unsqueeze(-1))
        moments_(first, second.square_() if fmt.root else second, gradient, beta1=beta1, beta2=beta2)
        if fmt.root:
            second.sqrt_()
        start = offset + down.start * columns + across.start
        where = {"seed": seed, "step": step, "param_index": param_index, "offset": start}
        fraction1, fraction2 = _fractions(codes1, where)
        _compress(first, fraction1, fmt.first, codes1, scale1)
        _compress(second, fraction2, fmt.second, codes2, scale2)
        root = second if fmt.root else second.sqrt_()
        weight = _blocks(target.float())
        apply_(
            weight, first, root, lr=lr, beta1=beta1, beta2=beta2, eps=eps,
            weight_decay=weight_decay, step=step,
        )  # fmt: skip
        _write_back(target, weight, where if stochastic_rounding else None)
        kept.put_back()


def moments(state: State8bit, fmt: Format = SHIPPED) -> tuple[torch.Tensor, torch.Tensor]:
    """Decompressed (m, v) in fp32, shape of the parameter."""
    rows, columns, _ = grid(tuple(state.codes1.shape))

    def decompress(codes: torch.Tensor, scale_RK: torch.Tensor, code: Code) -> torch.Tensor:
        if codes.numel() == 0:
            return torch.zeros(codes.shape, device=codes.device)
        value_RKB = code.decode(_blocks(codes.view(rows, columns))) * scale_RK.unsqueeze(-1)
        return _unblock(value_RKB, columns).reshape(codes.shape)

    first = decompress(state.codes1, state.scale1, fmt.first)
    second = decompress(state.codes2, state.scale2, fmt.second)
    return first, second.square() if fmt.root else second
