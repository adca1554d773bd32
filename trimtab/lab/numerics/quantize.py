"""INT8 and NF4: the quantization error of a tensor with one scale per tensor, row or block."""

# R rows, C columns

from __future__ import annotations

import enum
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trimtab.facts.errors import RecipeError
from trimtab.facts.names import shortened
from trimtab.kernels import int8, nf4
from trimtab.kernels.int8 import spec as int8_spec
from trimtab.kernels.nf4 import spec as nf4_spec
from trimtab.lab.numerics.activation_scales import ActivationScales, study_activation_scales
from trimtab.lab.numerics.clipping import ClippingSweep, sweep_clipping
from trimtab.lab.numerics.naive_cast import NaiveCast, naive_cast
from trimtab.lab.numerics.samples import load_sample

DEFAULT_BLOCKS = (32, 64, 128, 256)
BINS = 40


class Scheme(enum.Enum):
    """A quantization scheme."""

    INT8_ABSMAX = "int8 absmax"
    INT8_AFFINE = "int8 affine"
    NF4 = "nf4"
    NF4_DOUBLE = "nf4, scales in 8 bits"


@dataclass(frozen=True)
class Spread:
    """Statistics of the values."""

    smallest: float
    largest: float
    mean: float
    deviation: float

    @property
    def absmax(self) -> float:
        """The largest magnitude."""
        return max(-self.smallest, self.largest)


@dataclass(frozen=True)
class ErrorRow:
    """The error of a scheme on the values."""

    scheme: Scheme
    shared_by: str
    """The values that share a scale: "tensor", "row" or "64 values"."""
    bytes_per_value: float
    """Scales and tables included."""
    rms_error: float
    max_error: float
    signal_to_noise: float
    """10 · log10 of the values' mean square over the error's, in dB; infinite without error."""


@dataclass(frozen=True)
class Counts:
    """One histogram of a `Distribution`."""

    name: str
    counts: tuple[int, ...]


@dataclass(frozen=True)
class Distribution:
    """Histograms with shared edges."""

    edges: tuple[float, ...]
    counts: tuple[Counts, ...]


@dataclass(frozen=True)
class QuantizeStudy:
    """All results for one sample."""

    data: str
    description: str
    shape: tuple[int, int]
    spread: Spread
    rows: tuple[ErrorRow, ...]
    naive: NaiveCast
    clipping: tuple[ClippingSweep, ...]
    activations: ActivationScales
    """On random activations, whatever the values are."""
    values: Distribution
    errors: tuple[Distribution, ...]

    def records(self) -> list[dict[str, Any]]:
        """One JSON record for each scheme, one for the cast, one for each sweep, one for activations."""
        sample = {"data": self.data, "shape": self.shape}
        records = [{**sample, "row": row} for row in self.rows]
        return [
            *records,
            {**sample, "naive_cast": self.naive, "spread": self.spread},
            *({**sample, "clipping": sweep} for sweep in self.clipping),
            {"activation_scales": self.activations},
        ]


def study_quantization(
    data: str = "gauss", blocks: Sequence[int] = DEFAULT_BLOCKS, seed: int = 0
) -> QuantizeStudy:
    """Quantizes values with every scheme and measures the errors.

    Args:
        data: gauss, outliers, uniform, relu, activations, or FILE.safetensors:TENSOR.
        blocks: block sizes, for INT8 in groups and NF4: 32, 64, … 4096.
        seed: seed of randomly drawn values.

    Example:
        >>> study = study_quantization("gauss", [64])
        >>> [(row.scheme.value, row.shared_by, round(row.signal_to_noise)) for row in study.rows][-2:]
        [('nf4', '64 values', 21), ('nf4, scales in 8 bits', '64 values', 21)]
    """
    sizes = check_blocks(blocks)
    sample = load_sample(data, seed)
    x_RC = sample.values_RC
    restored = _restored(x_RC, sizes)
    rows = tuple(
        _error_row(x_RC, scheme, shared_by, size, back_RC)
        for (scheme, shared_by), (size, back_RC) in restored.items()
    )
    errors_RC = {key: back_RC - x_RC for key, (_, back_RC) in restored.items()}
    spread = Spread(float(x_RC.min()), float(x_RC.max()), float(x_RC.mean()), float(x_RC.std(correction=0)))
    return QuantizeStudy(
        data,
        sample.description,
        (x_RC.shape[0], x_RC.shape[1]),
        spread,
        rows,
        naive_cast(x_RC),
        tuple(sweep_clipping(x_RC, bits) for bits in (8, 4)),
        study_activation_scales(seed),
        _distribution({"values": x_RC}, symmetric=False),
        tuple(_error_distribution(errors_RC, family) for family in _FAMILIES),
    )


def check_blocks(blocks: Sequence[int]) -> tuple[int, ...]:
    """Sorts and deduplicates block sizes; raises RecipeError for those that NF4 does not support.

    Example:
        >>> check_blocks([64, 32, 64])
        (32, 64)
    """
    known = ", ".join(map(str, nf4_spec.BLOCKS))
    if not blocks:
        raise RecipeError("--blocks names no block size", f"use some of {known}")
    for block in blocks:
        if block not in nf4_spec.BLOCKS:
            raise RecipeError(f"NF4 has no blocks of {block} values", f"use some of {known}")
    return tuple(sorted(set(blocks)))


def parse_blocks(words: Sequence[str]) -> list[int]:
    """Parses the block sizes of an option.

    Example:
        >>> parse_blocks(["32", "64"])
        [32, 64]
    """
    for word in words:
        if not re.fullmatch(r"-?[0-9]{1,9}", word):
            raise RecipeError(f"'{shortened(word)}' is not a block size", "use whole numbers, as in 32,64")
    return [int(word) for word in words]


_Key = tuple[Scheme, str]
_FAMILIES = ((Scheme.INT8_ABSMAX, Scheme.INT8_AFFINE), (Scheme.NF4, Scheme.NF4_DOUBLE))


def _restored(x_RC: torch.Tensor, blocks: Sequence[int]) -> dict[_Key, tuple[int, torch.Tensor]]:
    """(bytes, dequantized values) of every scheme."""
    restored: dict[_Key, tuple[int, torch.Tensor]] = {}
    shape = (x_RC.shape[0], x_RC.shape[1])
    for scheme, word in ((Scheme.INT8_ABSMAX, "absmax"), (Scheme.INT8_AFFINE, "affine")):
        ways = [("tensor", "tensor", 0), ("row", "row", shape[1])]
        ways += [(f"{block} values", "group", block) for block in blocks]
        for shared_by, granularity, length in ways:
            tensor = int8.quantize(x_RC, granularity=granularity, group=length or 1, scheme=word)
            size = int8_spec.tensor_bytes(shape, length, scheme is Scheme.INT8_AFFINE)
            restored[scheme, shared_by] = size, int8.dequantize(tensor)
    for scheme in (Scheme.NF4, Scheme.NF4_DOUBLE):
        double = scheme is Scheme.NF4_DOUBLE
        for block in blocks:
            weight = nf4.quantize(x_RC, block=block, double=double)
            restored[scheme, f"{block} values"] = weight.num_bytes, nf4.dequantize(weight)
    return restored


def _error_row(
    x_RC: torch.Tensor, scheme: Scheme, shared_by: str, size: int, back_RC: torch.Tensor
) -> ErrorRow:
    error_RC = back_RC.double() - x_RC.double()
    noise, signal = float(error_RC.square().mean()), float(x_RC.double().square().mean())
    ratio = 10 * math.log10(signal / noise) if noise else math.inf
    return ErrorRow(
        scheme, shared_by, size / x_RC.numel(), math.sqrt(noise), float(error_RC.abs().max()), ratio
    )


def _error_distribution(errors_RC: dict[_Key, torch.Tensor], family: tuple[Scheme, ...]) -> Distribution:
    """The errors of a family's schemes: with one scale, with one for each row, and in the smallest blocks."""
    errors_by_name = {
        f"{scheme.value}, {shared}": e for (scheme, shared), e in errors_RC.items() if scheme in family
    }
    names = [name for name in errors_by_name if name.endswith(("tensor", "row"))] or list(errors_by_name)
    return _distribution({name: errors_by_name[name] for name in names[:4]}, symmetric=True)


def _distribution(named: dict[str, torch.Tensor], *, symmetric: bool) -> Distribution:
    lowest = min(float(values.min()) for values in named.values())
    highest = max(float(values.max()) for values in named.values())
    if symmetric:
        highest = max(-lowest, highest) or 1.0
        lowest = -highest
    # Weighted ends instead of steps from the first one: the middle edge of a symmetric range is then exactly 0.
    share = torch.arange(BINS + 1, dtype=torch.float64) / BINS
    edges = lowest * (1 - share) + highest * share
    counts = tuple(
        Counts(name, tuple(int(n) for n in torch.histogram(values.double().flatten(), edges).hist))
        for name, values in named.items()
    )
    return Distribution(tuple(edges.tolist()), counts)
