"""The values to quantize: drawn at random, or a tensor of a safetensors file."""

# R rows (output channels of a weight), C columns

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from trimtab.facts.errors import DataError, RecipeError
from trimtab.facts.names import path_of, shortened

KINDS = {
    "gauss": "normal values, standard deviation 0.02, as weights have",
    "outliers": "the same, one value in a thousand 20 times as large",
    "uniform": "all values between -0.05 and 0.05 equally likely",
    "relu": "normal values, those below zero set to 0, as activations after a ReLU",
    "activations": "normal values in rows of log-normal magnitude (tokens), four columns (channels) 20 times as large",
}
"""Name and description of the random distributions."""
SHAPE = (256, 512)
TOKEN_DEVIATION = 0.5
"""Standard deviation of the logarithm of a token's magnitude, for `activations`."""
OUTLIER_CHANNELS = 4
"""Channels that are large in every token, as in the activations of language models (LLM.int8(), arXiv 2208.07339)."""
MOST_VALUES = 2**21
"""Maximum number of values of a tensor; more rows would not change the displayed digits."""
SUFFIX = ".safetensors"


@dataclass(frozen=True)
class Sample:
    """The values to quantize: finite, and not all equal."""

    name: str
    description: str
    values_RC: torch.Tensor
    """fp32."""


def load_sample(data: str, seed: int = 0) -> Sample:
    """The values of a distribution in KINDS, or of `FILE.safetensors:TENSOR`.

    A tensor is reshaped to rows of its last dimension. Only the first rows of a large tensor are used.

    Example:
        >>> load_sample("gauss").values_RC.shape
        torch.Size([256, 512])
    """
    if data in KINDS:
        return Sample(data, KINDS[data], _drawn(data, seed))
    if SUFFIX not in data:
        near = difflib.get_close_matches(data, KINDS, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        raise RecipeError(
            f"there is no data '{shortened(data)}'",
            f"{hint}use one of {', '.join(KINDS)}, or a tensor as FILE.safetensors:TENSOR",
        )
    head, _, name = data.rpartition(f"{SUFFIX}:")
    path = path_of(f"{head}{SUFFIX}" if head else data, "--data")
    tensor, shape = _read(path, name)
    values_RC = tensor.reshape(-1, shape[-1]) if len(shape) > 1 else tensor.reshape(1, -1)
    columns = min(values_RC.shape[1], MOST_VALUES)
    values_RC = values_RC[: max(1, MOST_VALUES // columns), :columns].float().contiguous()
    _check_values(values_RC, name)
    text = f"{tuple(shape)}, {str(tensor.dtype).removeprefix('torch.')}"
    taken = values_RC.numel()
    part = f", the first {taken:,} values" if taken < math.prod(shape) else ""
    return Sample(name, f"{text} in {path.name}{part}", values_RC)


def _drawn(kind: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "uniform":
        return torch.rand(SHAPE, generator=generator) * 0.1 - 0.05
    values_RC = torch.randn(SHAPE, generator=generator) * 0.02
    if kind == "relu":
        return values_RC.relu()
    if kind == "activations":
        tokens_R1 = (TOKEN_DEVIATION * torch.randn(SHAPE[0], 1, generator=generator)).exp()
        values_RC = values_RC * tokens_R1
        values_RC[:, :: SHAPE[1] // OUTLIER_CHANNELS] *= 20
        return values_RC
    if kind == "outliers":
        large_RC = torch.rand(SHAPE, generator=generator) < 1e-3
        values_RC = torch.where(large_RC, 20 * values_RC, values_RC)
    return values_RC


def _read(path: Path, name: str) -> tuple[torch.Tensor, list[int]]:
    """The needed slices of the first dimension, and the shape of the full tensor."""
    if not path.is_file():
        raise DataError(f"{path} does not exist", "pass the path of a safetensors file")
    try:
        opened: Any = safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} cannot be read ({error})", "download or write the file again") from None
    with opened:
        names = sorted(opened.keys())
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1, cutoff=0.3)
            hint = f"did you mean {near[0]}? " if near else ""
            shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
            raise RecipeError(
                f"{path.name} has no tensor '{shortened(name)}'",
                f"{hint}name one with :TENSOR; it has {shown}",
            )
        stored = opened.get_slice(name)
        shape = list(stored.get_shape())
        if not math.prod(shape):
            raise DataError(f"{name} in {path.name} is empty", "choose another tensor")
        inner = math.prod(shape[1:])
        tensor = stored[: -(-MOST_VALUES // inner)] if shape else opened.get_tensor(name)
    if not tensor.is_floating_point():
        raise DataError(
            f"{name} in {path.name} has the dtype {tensor.dtype}", "choose a floating-point tensor"
        )
    return tensor, shape or [1]


def _check_values(values_RC: torch.Tensor, name: str) -> None:
    wrong = int((~values_RC.isfinite()).sum())
    if wrong:
        raise DataError(f"{name} has {wrong:,} values that are NaN or infinite", "choose another tensor")
    if bool((values_RC == values_RC.flatten()[0]).all()):
        raise DataError(f"all values of {name} are equal", "choose a tensor whose values differ")
