"""The 8-bit AdamW step in torch, in chunks that bound the memory of dequantized elements."""

# R rows, C columns (last dimension), K blocks per row; _RC a chunk, _RKB the same padded to whole blocks of 256

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from trimtab.kernels.adamw8bit import State8bit
from trimtab.kernels.adamw8bit.code import DEFAULT_FORMAT, QuantizationMap, StateFormat
from trimtab.kernels.adamw8bit.spec import BLOCK, CHUNK, GROUP, MULTIPLIER, TINY, grid
from trimtab.kernels.adamw8bit.update import Snapshot
from trimtab.kernels.stochastic_rounding import random_bits_at, round_with_, stochastic_round_


def new_state(param: torch.Tensor, fmt: StateFormat = DEFAULT_FORMAT) -> State8bit:
    """Creates zero moments: zero scales, and the codes nearest to zero."""
    rows, _, blocks = grid(tuple(param.shape))
    codes1 = torch.full(param.shape, fmt.first.zero, dtype=torch.uint8, device=param.device)
    codes2 = torch.full(param.shape, fmt.second.zero, dtype=torch.uint8, device=param.device)
    scale1 = torch.zeros(rows, blocks, dtype=torch.float32, device=param.device)
    return State8bit(codes1, scale1, codes2, torch.zeros_like(scale1))


def _chunks(rows: int, columns: int, size: int) -> Iterator[tuple[slice, slice]]:
    """Yields chunks of contiguous elements: full rows, or full blocks of one row."""
    if columns <= size:
        height = max(1, size // columns)
        for top in range(0, rows, height):
            yield slice(top, min(top + height, rows)), slice(0, columns)
        return
    for row in range(rows):
        for left in range(0, columns, size):
            yield slice(row, row + 1), slice(left, min(left + size, columns))


def _blocks(x_RC: torch.Tensor) -> torch.Tensor:
    """[R, C] → [R, K, 256], zero-padded after a short last block."""
    short = -x_RC.shape[1] % BLOCK
    padded = F.pad(x_RC, (0, short)) if short else x_RC
    return padded.reshape(x_RC.shape[0], -1, BLOCK)


def _unblock(x_RKB: torch.Tensor, columns: int) -> torch.Tensor:
    return x_RKB.view(x_RKB.shape[0], -1)[:, :columns]


def _quantize(
    value_RKB: torch.Tensor,
    fraction_RKB: torch.Tensor,
    code: QuantizationMap,
    codes_RC: torch.Tensor,
    scale_RK: torch.Tensor,
) -> None:
    largest_RK = value_RKB.abs().amax(dim=-1)
    # divides by a tensor: for a Python scalar torch multiplies by its reciprocal on a GPU
    to_peak_RK = value_RKB.new_full((), code.peak) / largest_RK.clamp_min(TINY)
    scaled_RKB = value_RKB * to_peak_RK.unsqueeze(-1)
    codes_RC.copy_(_unblock(code.encode(scaled_RKB, fraction_RKB), codes_RC.shape[1]))
    scale_RK.copy_(torch.where(largest_RK < TINY, 0.0, largest_RK))


def _dequantize(
    codes_RC: torch.Tensor, scale_RK: torch.Tensor, code: QuantizationMap, beta: float
) -> torch.Tensor:
    """β times the moment, in blocks."""
    unit_RK = (scale_RK * (1 / code.peak)).mul_(beta)
    # padded after decoding: code 0 does not decode to zero, and padding must not become a block's maximum
    return _blocks(code.decode(codes_RC)).mul_(unit_RK.unsqueeze(-1))


def _words(rows: int, columns: int, where: dict[str, int], device: torch.device) -> torch.Tensor:
    """int32 [rows, columns], a random word per element: one hash per eight elements, times a multiplier per element."""
    start = torch.arange(0, columns, GROUP, device=device)
    index_RG = torch.arange(rows, device=device).unsqueeze(1) * columns + start + where["offset"]
    hashed_RG = random_bits_at(index_RG, **{key: where[key] for key in ("seed", "step", "param_index")})
    # int32 products wrap, as mod 2³² requires; factors are Python scalars, since a tensor of them would be copied to
    # the GPU, which synchronizes
    powers = [pow(MULTIPLIER, k, 1 << 32) for k in range(GROUP)]
    products = [hashed_RG * (power - (power >> 31 << 32)) for power in powers]
    return torch.stack(products, -1).view(rows, -1)[:, :columns]


def _write_back(target_RC: torch.Tensor, weight_RKB: torch.Tensor, words_RC: torch.Tensor | None) -> None:
    if weight_RKB.data_ptr() == target_RC.data_ptr():
        return  # fp32 in full blocks: the parameter was updated in place
    updated_RC = _unblock(weight_RKB, target_RC.shape[1])
    if target_RC.dtype == torch.bfloat16 and words_RC is not None:
        round_with_(target_RC, updated_RC, words_RC)
    else:
        target_RC.copy_(updated_RC)


def _factors(
    grad_scale: torch.Tensor | float, beta1: float, beta2: float, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors of a gradient in m and in √v."""
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
    """Like `update.apply_`, in single operations: fused ones round differently on a GPU and a CPU."""
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
    """The step of a tensor with both moments in fp32, for tensors of fewer than 4096 elements."""
    kept = Snapshot([param, *state], skip)
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
    kept.restore()


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
    fmt: StateFormat = DEFAULT_FORMAT,
) -> None:
    """See `trimtab.kernels.adamw8bit.adamw8bit_step`; benchmarks pass other maps as `fmt`."""
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
        kept = Snapshot([target, codes1, codes2, scale1, scale2], skip)
        gradient = _blocks(grad_RC[down, across].float())
        first = _dequantize(codes1, scale1, fmt.first, beta1).add_(gradient * factor1)
        second = _dequantize(codes2, scale2, fmt.second, math.sqrt(beta2) if fmt.root else beta2)
        second = second.square_() if fmt.root else second
        second.add_((gradient * factor2).square_())
        root = second.sqrt()
        where = {**place, "offset": offset + down.start * columns + across.start}
        words = _words(codes1.shape[0], codes1.shape[1], where, param.device)
        # the middle bits of a word round both moments, its upper half the weight
        fraction = _blocks((words >> 7).bitwise_and_(0xFFFF).float().add_(0.5).mul_(2.0**-16))
        _quantize(first, fraction, fmt.first, codes1, scale1)
        _quantize(root if fmt.root else second, fraction, fmt.second, codes2, scale2)
        weight = _blocks(target.float())
        _apply(weight, first, root, **hyper)
        _write_back(target, weight, words.bitwise_right_shift_(16) if stochastic_rounding else None)
        kept.restore()


def moments(state: State8bit, fmt: StateFormat = DEFAULT_FORMAT) -> tuple[torch.Tensor, torch.Tensor]:
    """Dequantized (m, v) in fp32, shape of the parameter."""
    rows, columns, _ = grid(tuple(state.codes1.shape))

    def dequantize(codes: torch.Tensor, scale_RK: torch.Tensor, code: QuantizationMap) -> torch.Tensor:
        if codes.numel() == 0:
            return torch.zeros(codes.shape, device=codes.device)
        value_RKB = _dequantize(codes.view(rows, columns), scale_RK, code, 1.0)
        return _unblock(value_RKB, columns).reshape(codes.shape)

    first = dequantize(state.codes1, state.scale1, fmt.first)
    second = dequantize(state.codes2, state.scale2, fmt.second)
    return first, second.square() if fmt.root else second
