"""8-bit quantization in torch: the kernels must be bitwise identical to it."""

# R rows, C columns, S scales, G values per group

from __future__ import annotations

import torch

from trimtab.kernels.int8 import spec


def parameters(
    low_S: torch.Tensor, high_S: torch.Tensor, affine: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scale, its reciprocal (0 for a scale of 0) and zero point from each group's minimum and maximum in fp32."""
    # Divides by a tensor: for a Python scalar a GPU multiplies by its reciprocal, and the scale would be an ulp off.
    steps_S = torch.full_like(low_S, 255.0 if affine else 127.0)
    if affine:
        low_S, high_S = low_S.clamp(max=0.0), high_S.clamp(min=0.0)
        scale_S = high_S / steps_S - low_S / steps_S
    else:
        scale_S = torch.maximum(-low_S, high_S) / steps_S
    tiny_S = scale_S < spec.SMALLEST_NORMAL
    scale_S = torch.where(tiny_S, torch.zeros_like(scale_S), scale_S)
    inverse_S = torch.where(tiny_S, torch.zeros_like(scale_S), scale_S.reciprocal())
    zero_S = (-low_S * inverse_S).round() - 128.0 if affine else torch.zeros_like(scale_S)
    return scale_S, inverse_S, zero_S


def quantize(x: torch.Tensor, length: int, affine: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns codes int8 like x, scale fp32 [S], zero point int8 [S] (absmax: [0]). `length` 0: one group."""
    columns = x.shape[-1] if x.ndim else 1
    count = spec.num_scales(tuple(x.shape), length)
    if x.numel() == 0:
        empty = x.new_zeros(count, dtype=torch.float32)
        return x.to(torch.int8), empty, empty[: count * affine].to(torch.int8)
    rows_RC = x.reshape(1, -1) if length == 0 else x.reshape(-1, columns)
    length = length or x.numel()
    # repeating the last value changes neither the minimum nor the maximum of a short group
    short = -rows_RC.shape[1] % length
    padded = torch.cat((rows_RC, rows_RC[:, -1:].expand(-1, short)), 1) if short else rows_RC
    groups_SG = padded.reshape(count, length).float()
    scale_S, inverse_S, zero_S = parameters(groups_SG.amin(1), groups_SG.amax(1), affine)
    value_SG = (groups_SG * inverse_S.unsqueeze(1)).round() + zero_S.unsqueeze(1)
    codes_SG = value_SG.clamp(-128.0 if affine else -127.0, 127.0).to(torch.int8)
    codes = codes_SG.view(rows_RC.shape[0], -1)[:, : rows_RC.shape[1]].reshape(x.shape)
    return codes, scale_S, zero_S[: count * affine].to(torch.int8)


def dequantize(
    codes: torch.Tensor,
    scale_S: torch.Tensor,
    zero_S: torch.Tensor,
    length: int,
    dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `trimtab.kernels.int8.dequantize`."""
    if codes.numel() == 0:
        return codes.to(dtype) if out is None else out
    columns = codes.shape[-1] if codes.ndim else 1
    if length:
        groups = -(-columns // length)
        if groups == 1:  # one scale per row is broadcast, not repeated
            scale = scale_S.view(*codes.shape[:-1], 1) if codes.ndim else scale_S.view(())
        else:
            scale = scale_S.view(-1, groups).repeat_interleave(length, 1)[:, :columns].reshape(codes.shape)
    else:
        scale = scale_S.view(())
    value = codes.float()
    if zero_S.numel():
        if length:
            zero = zero_S.view(-1, groups).repeat_interleave(length, 1)[:, :columns].reshape(codes.shape)
        else:
            zero = zero_S
        value = value - zero.float()
    value = value.mul_(scale)
    return value.to(dtype).view(codes.shape) if out is None else out.copy_(value.view(codes.shape))
