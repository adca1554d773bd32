"""Settings of a study model's step: precision, kernels, loss, part and mode. Imports no torch."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Precision(enum.Enum):
    """Dtype of the products; weights are always fp32."""

    FP32 = "fp32"
    TF32 = "tf32"
    BF16 = "bf16"
    FP16 = "fp16"

    @property
    def is_mixed(self) -> bool:
        """Whether products run in 16 bits under autocast."""
        return self in (Precision.BF16, Precision.FP16)


class Kernels(enum.Enum):
    """The implementations that a study model uses."""

    REFERENCE = "reference"
    FAST = "fast"


class Loss(enum.Enum):
    """The differentiated loss."""

    LOGITS_SUM = "logits_sum"
    CROSS_ENTROPY = "cross_entropy"

    @property
    def label(self) -> str:
        """The name in tables.

        Example:
            >>> Loss.CROSS_ENTROPY.label
            'cross entropy'
        """
        return self.value.replace("_", " ")


class Mode(enum.Enum):
    """How a step is executed."""

    EAGER = "eager"
    COMPILED = "compiled"
    """The whole model through torch.compile."""
    GRAPHS = "graphs"
    """Forward and backward captured as CUDA graphs and replayed."""


class TimedPart(enum.Enum):
    """The timed part of a step."""

    FORWARD = "forward"
    BACKWARD = "backward"
    """The backward pass alone: a new forward pass precedes each one, outside the timed part."""
    FORWARD_BACKWARD = "both"
    FULL = "full"
    """Forward, backward and AdamW."""

    @property
    def label(self) -> str:
        """The name in tables.

        Example:
            >>> [part.label for part in TimedPart]
            ['forward', 'backward', 'forward + backward', 'with optimizer']
        """
        return {"both": "forward + backward", "full": "with optimizer"}.get(self.value, self.value)


@dataclass(frozen=True)
class StepSettings:
    """One configuration of a study model.

    Example:
        >>> StepSettings("small", context=128, batch=4).precision
        <Precision.FP32: 'fp32'>
    """

    size: str
    """A study model, or any name that `trimtab.lab.study_models.named_shape` accepts."""
    context: int
    batch: int
    precision: Precision = Precision.FP32
    kernels: Kernels = Kernels.REFERENCE
    loss: Loss = Loss.LOGITS_SUM
    device: str = "cpu"
