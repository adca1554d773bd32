"""The cast to int8 that wraps around: 256 bins do not fit into codes up to 127."""

# R rows, C columns

from __future__ import annotations

from dataclasses import dataclass

import torch

from trimtab.lab.numerics.block_codes import INT8_LARGEST


@dataclass(frozen=True)
class CastRow:
    """One value through 256 bins, stored as int8 by a cast and as uint8."""

    value: float
    bin: int
    as_int8: int
    from_int8: float
    from_uint8: float


@dataclass(frozen=True)
class NaiveCast:
    """Bins 0…255 between the smallest and the largest value, cast to int8: bins above 127 wrap around."""

    wrapped: float
    """Share of values in bins above 127."""
    rms_error: float
    rms_error_uint8: float
    rows: tuple[CastRow, ...]


def naive_cast(x_RC: torch.Tensor) -> NaiveCast:
    """Quantizes to 256 bins, casts them to int8 without regard to its range, and to uint8 for comparison.

    Example:
        >>> found = naive_cast(torch.tensor([[-1.0, -0.5, 0.0, 0.2, 1.0]]))
        >>> [(row.bin, row.as_int8) for row in found.rows]
        [(0, 0), (64, 64), (128, -128), (153, -103), (255, -1)]
    """
    x_RC = x_RC.double()
    low, high = x_RC.min(), x_RC.max()
    width = (high - low) / 255
    bins_RC = ((x_RC - low) / width).round()
    # Via int32: casting a float outside int8's range is undefined in C, and wraps on most machines.
    int8_RC = bins_RC.to(torch.int32).to(torch.int8)
    from_int8_RC, from_uint8_RC = int8_RC.double() * width + low, bins_RC * width + low
    order = x_RC.flatten().argsort()
    last = order.numel() - 1
    rows = []
    for share in (0, 25, 50, 75, 100):
        at = int(order[last * share // 100])
        pick = [float(t.flatten()[at]) for t in (x_RC, bins_RC, int8_RC, from_int8_RC, from_uint8_RC)]
        rows.append(CastRow(pick[0], int(pick[1]), int(pick[2]), pick[3], pick[4]))
    return NaiveCast(
        float((bins_RC > INT8_LARGEST).double().mean()),
        _rms(from_int8_RC - x_RC),
        _rms(from_uint8_RC - x_RC),
        tuple(rows),
    )


def _rms(error: torch.Tensor) -> float:
    return float(error.square().mean().sqrt())
