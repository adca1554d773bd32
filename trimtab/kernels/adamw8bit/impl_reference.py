"""The 8-bit AdamW step in torch, chunk by chunk so that little is decompressed at once."""

# R rows, C columns (last dimension), K blocks a row; _RC a chunk, _RKB the same padded to whole blocks of 256

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from trimtab.kernels.adamw8bit import State8bit
from trimtab.kernels.adamw8bit.code import SHIPPED, Code, Format
from trimtab.kernels.adamw8bit.spec import BLOCK, CHUNK, GROUP, MULTIPLIER, TINY, grid
from trimtab.kernels.adamw8bit.update import Kept
from trimtab.kernels.stochastic_rounding import round_with_, stochastic_round_, words_at


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
    # by a tensor: on a GPU torch divides by a number by multiplying with its reciprocal
    to_peak_RK = value_RKB.new_full((), code.peak) / largest_RK.clamp_min(TINY)
    scaled_RKB = value_RKB * to_peak_RK.unsqueeze(-1)
    codes_RC.copy_(_unblock(code.encode(scaled_RKB, fraction_RKB), codes_RC.shape[1]))
    scale_RK.copy_(torch.where(largest_RK < TINY, 0.0, largest_RK))


def _decompress(codes_RC: torch.Tensor, scale_RK: torch.Tensor, code: Code, beta: float) -> torch.Tensor:
    """β times the moment, in blocks."""
    unit_RK = (scale_RK * (1 / code.peak)).mul_(beta)
    # padded when decoded: the code 0 is no zero, and behind a short block must not be its largest
    return _blocks(code.decode(codes_RC)).mul_(unit_RK.unsqueeze(-1))


def _words(rows: int, columns: int, where: dict[str, int], device: torch.device) -> torch.Tensor:
    """int32 [rows, columns], one random word an element: a hash for every eight, then a multiplier each."""
    start = torch.arange(0, columns, GROUP, device=device)
    index_RG = torch.arange(rows, device=device).unsqueeze(1) * columns + start + where["offset"]
    hashed_RG = words_at(index_RG, **{key: where[key] for key in ("seed", "step", "param_index")})
    # int32 products wrap, which is what mod 2³² asks for; factors as numbers, since a tensor of them would be
    # copied to a GPU, which waits for it
    powers = [pow(MULTIPLIER, k, 1 << 32) for k in range(GROUP)]
    products = [hashed_RG * (power - (power >> 31 << 32)) for power in powers]
    return torch.stack(products, -1).view(rows, -1)[:, :columns]


def _write_back(target_RC: torch.Tensor, weight_RKB: torch.Tensor, words_RC: torch.Tensor | None) -> None:
    if weight_RKB.data_ptr() == target_RC.data_ptr():
        return  # fp32 in whole blocks: the arithmetic was done in the parameter itself
    updated_RC = _unblock(weight_RKB, target_RC.shape[1])
    if target_RC.dtype == torch.bfloat16 and words_RC is not None:
        round_with_(target_RC, updated_RC, words_RC)
    else:
        target_RC.copy_(updated_RC)


def _factors(
    grad_scale: torch.Tensor | float, beta1: float, beta2: float, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a gradient is multiplied with on its way into m, and into √v."""
    scale = torch.as_tensor(grad_scale, dtype=torch.float32).to(device, non_blocking=True)
    return scale * (1 - beta1), scale * math.sqrt(1 - beta2)


def _apply(
    weight_N: torch.Tensor,
    first_N: torch.Tensor,
    root_N: torch.Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
) -> None:
    """As `update.apply_`, in single operations: a fused one would round otherwise on a GPU than on a CPU."""
    update_N = first_N / root_N.mul(1 / math.sqrt(1 - beta2**step)).add_(eps)
    weight_N.mul_(1 - lr * weight_decay).sub_(update_N.mul_(lr / (1 - beta1**step)))


def fp32_step(
    param: torch.Tensor,
    grad: torch.Tensor,
    state: tuple[torch.Tensor, torch.Tensor],
    *,
    beta1: float,
    beta2: float,
    step: int,
    grad_scale: torch.Tensor | float = 1.0,
    seed: int = 0,
    param_index: int = 0,
    stochastic_rounding: bool = True,
    skip: torch.Tensor | None = None,
    **hyper: float,
) -> None:
    """The step of a tensor that keeps both moments in fp32: those of fewer than 4096 elements."""
    kept = Kept([param, *state], skip)
    first, second = state
    factor1, factor2 = _factors(grad_scale, beta1, beta2, param.device)
    gradient = grad.float()
    first.mul_(beta1).add_(gradient * factor1)
    second.mul_(beta2).add_((gradient * factor2).square_())
    weight = param.float()
    _apply(weight, first, second.sqrt(), beta1=beta1, beta2=beta2, step=step, **hyper)
    if param.dtype == torch.bfloat16 and stochastic_rounding:
        stochastic_round_(param, weight, seed=seed, step=step, param_index=param_index)
    elif weight is not param:
        param.copy_(weight)
    kept.put_back()


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
    factor1, factor2 = _factors(grad_scale, beta1, beta2, param.device)
    place = {"seed": seed, "step": step, "param_index": param_index}
    hyper: dict[str, Any] = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps}
    hyper |= {"weight_decay": weight_decay, "step": step}
    for down, across in _chunks(rows, columns, size):
        tiles = slice(across.start // BLOCK, -(-across.stop // BLOCK))
        codes1, codes2 = codes1_RC[down, across], codes2_RC[down, across]
        scale1, scale2 = state.scale1[down, tiles], state.scale2[down, tiles]
        target = weight_RC[down, across]
        kept = Kept([target, codes1, codes2, scale1, scale2], skip)
        gradient = _blocks(grad_RC[down, across].float())
        first = _decompress(codes1, scale1, fmt.first, beta1).add_(gradient * factor1)
        second = _decompress(codes2, scale2, fmt.second, math.sqrt(beta2) if fmt.root else beta2)
        second = second.square_() if fmt.root else second
        second.add_((gradient * factor2).square_())
        root = second.sqrt()
        where = {**place, "offset": offset + down.start * columns + across.start}
        words = _words(codes1.shape[0], codes1.shape[1], where, param.device)
        # the middle bits of a word decide for both moments, its upper half for the weight
        fraction = _blocks((words >> 7).bitwise_and_(0xFFFF).float().add_(0.5).mul_(2.0**-16))
        _compress(first, fraction, fmt.first, codes1, scale1)
        _compress(root if fmt.root else second, fraction, fmt.second, codes2, scale2)
        weight = _blocks(target.float())
        _apply(weight, first, root, **hyper)
        _write_back(target, weight, words.bitwise_right_shift_(16) if stochastic_rounding else None)
        kept.put_back()


def moments(state: State8bit, fmt: Format = SHIPPED) -> tuple[torch.Tensor, torch.Tensor]:
    """Decompressed (m, v) in fp32, shape of the parameter."""
    rows, columns, _ = grid(tuple(state.codes1.shape))

    def decompress(codes: torch.Tensor, scale_RK: torch.Tensor, code: Code) -> torch.Tensor:
        if codes.numel() == 0:
            return torch.zeros(codes.shape, device=codes.device)
        value_RKB = _decompress(codes.view(rows, columns), scale_RK, code, 1.0)
        return _unblock(value_RKB, columns).reshape(codes.shape)

    first = decompress(state.codes1, state.scale1, fmt.first)
    second = decompress(state.codes2, state.scale2, fmt.second)
    return first, second.square() if fmt.root else second
