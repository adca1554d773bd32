"""INT8 activations: scales fixed beforehand by calibration (static) against scales of the values at hand (dynamic)."""

# R rows (tokens), C columns (channels)

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from trimtab.kernels import int8
from trimtab.lab.numerics.block_codes import INT8_LARGEST
from trimtab.lab.numerics.clipping import round_uniformly
from trimtab.lab.numerics.samples import load_sample

PERCENTILE = 0.999
DATA = "activations"


@dataclass(frozen=True)
class ScaleRow:
    """The error of one choice of scales on tokens that calibration has not seen."""

    kind: str
    """static or dynamic."""
    source: str
    """Where the scale comes from."""
    shared_by: str
    """The values that share a scale."""
    largest: float
    """The largest magnitude that the (largest) scale represents."""
    clipped: float
    """Share of the values beyond it."""
    rms_error: float
    signal_to_noise: float
    """In dB."""


@dataclass(frozen=True)
class ActivationScales:
    """Static and dynamic scales on the same tokens."""

    calibration_tokens: int
    tokens: int
    calibration_absmax: float
    absmax: float
    """Of the quantized tokens."""
    rows: tuple[ScaleRow, ...]


def study_activation_scales(seed: int = 0) -> ActivationScales:
    """Calibrates on the first half of random activations and quantizes the second half to INT8.

    Example:
        >>> [(row.kind, row.shared_by) for row in study_activation_scales().rows]
        [('static', 'tensor'), ('static', 'tensor'), ('dynamic', 'tensor'), ('dynamic', 'token')]
    """
    values_RC = load_sample(DATA, seed).values_RC
    half = values_RC.shape[0] // 2
    calibration_RC, x_RC = values_RC[:half], values_RC[half:]
    magnitudes = calibration_RC.abs().flatten().double()
    absmax, percentile = float(magnitudes.max()), float(magnitudes.quantile(PERCENTILE))
    rows = (
        _static(x_RC, "largest magnitude of calibration", absmax),
        _static(x_RC, f"{PERCENTILE:.1%} of calibration's magnitudes", percentile),
        _dynamic(x_RC, "tensor", "tensor"),
        _dynamic(x_RC, "row", "token"),
    )
    return ActivationScales(half, x_RC.shape[0], absmax, float(x_RC.abs().max()), rows)


def _static(x_RC: torch.Tensor, source: str, largest: float) -> ScaleRow:
    back_RC = round_uniformly(x_RC.double(), largest, INT8_LARGEST)
    return _row(x_RC, back_RC, "static", source, "tensor", largest)


def _dynamic(x_RC: torch.Tensor, granularity: str, shared_by: str) -> ScaleRow:
    back_RC = int8.dequantize(int8.quantize(x_RC, granularity=granularity))
    largest = float(x_RC.abs().max())
    return _row(
        x_RC, back_RC.double(), "dynamic", f"largest magnitude of the {shared_by}", shared_by, largest
    )


def _row(
    x_RC: torch.Tensor, back_RC: torch.Tensor, kind: str, source: str, shared_by: str, largest: float
) -> ScaleRow:
    exact_RC = x_RC.double()
    noise = float((back_RC - exact_RC).square().mean())
    signal = float(exact_RC.square().mean())
    clipped = float((exact_RC.abs() > largest).double().mean())
    ratio = 10 * math.log10(signal / noise) if noise else math.inf
    return ScaleRow(kind, source, shared_by, largest, clipped, math.sqrt(noise), ratio)
