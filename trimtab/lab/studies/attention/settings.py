"""The settings that identify a measurement of the study. Imports no torch."""

# N length, D head dimension

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trimtab.kernels.attention.spec import IMPLS
from trimtab.lab.samples import damaged_record

PLAIN = "reference"
"""Plain attention: products, softmax and the matrix of probabilities, as in the papers."""
TILED = "tiled"
"""FlashAttention in plain PyTorch, for readers: `trimtab.kernels.attention.impl_tiled`. Recipes cannot select it."""
BACKENDS = (*IMPLS, TILED)
WEIGHTED_SUM = "weighted_sum"


class Mode(enum.Enum):
    """How the operation is executed."""

    EAGER = "eager"
    COMPILED = "compiled"
    """torch.compile of the whole operation as one graph, with static shapes."""


class Visibility(enum.Enum):
    """The keys that a query attends to."""

    CAUSAL = "causal"
    FULL = "full"


@dataclass(frozen=True)
class AttentionSettings:
    """One cell: a backend on one shape.

    Example:
        >>> settings = AttentionSettings("sdpa_flash", head_dim=64, length=1024)
        >>> AttentionSettings.from_dict(settings.to_dict()) == settings
        True
    """

    backend: str
    mode: Mode = Mode.EAGER
    dtype: str = "fp32"
    batch: int = 8
    heads: int = 1
    head_dim: int = 64
    length: int = 1024
    visibility: Visibility = Visibility.CAUSAL
    device: str = "cpu"
    """cpu or cuda."""
    repetitions: int = 100
    """Repetitions of each pass, unless the time ends earlier."""
    seconds: float = 2.0
    """Time for the repetitions of both passes together."""
    memory_bytes: int | None = None
    """The device's memory, which the cell's formula exceeds; None for a cell that is tried."""

    @property
    def causal(self) -> bool:
        """Whether queries do not attend to later keys."""
        return self.visibility is Visibility.CAUSAL

    @property
    def tried(self) -> bool:
        """Whether the cell is measured, and not only predicted to run out of memory."""
        return self.memory_bytes is None

    def to_dict(self) -> dict[str, Any]:
        """The settings of a cell: plain values, without those that are None."""
        plain = {**asdict(self), "mode": self.mode.value, "visibility": self.visibility.value}
        return {key: value for key, value in plain.items() if value is not None}

    @staticmethod
    def from_dict(settings: Mapping[str, Any]) -> AttentionSettings:
        """The settings of a cell; raises DataError for those of another study or version."""
        try:
            mode, visibility = Mode(settings["mode"]), Visibility(settings["visibility"])
            parsed = AttentionSettings(**{**settings, "mode": mode, "visibility": visibility})
        except (KeyError, TypeError, ValueError) as error:
            raise damaged_record("settings", f"{type(error).__name__}: {error}") from None
        if parsed.backend not in BACKENDS:
            raise damaged_record("settings", f"there is no backend {parsed.backend!r}")
        return parsed


@dataclass(frozen=True)
class WeightedSumSettings:
    """One cell of the tutorial's kernel: an implementation on rows × columns.

    Example:
        >>> WeightedSumSettings("triton").to_dict()["operation"]
        'weighted_sum'
    """

    impl: str
    dtype: str = "fp32"
    rows: int = 8192
    columns: int = 4096
    device: str = "cpu"
    repetitions: int = 100
    seconds: float = 2.0

    def to_dict(self) -> dict[str, Any]:
        """The settings of a cell; `operation` distinguishes them from those of attention."""
        return {"operation": WEIGHTED_SUM, **asdict(self)}

    @staticmethod
    def from_dict(settings: Mapping[str, Any]) -> WeightedSumSettings:
        """The settings of a cell; raises DataError for those of another version."""
        try:
            return WeightedSumSettings(
                **{key: value for key, value in settings.items() if key != "operation"}
            )
        except TypeError as error:
            raise damaged_record("settings", str(error)) from None


def is_weighted_sum(settings: Mapping[str, Any]) -> bool:
    """Whether a cell measures the tutorial's kernel.

    Example:
        >>> is_weighted_sum(WeightedSumSettings("triton").to_dict()), is_weighted_sum({"backend": "triton"})
        (True, False)
    """
    return settings.get("operation") == WEIGHTED_SUM
