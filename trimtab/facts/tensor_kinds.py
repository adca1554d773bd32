"""What the memory of a run is for."""

from __future__ import annotations

import enum


class TensorKind(enum.Enum):
    """The buckets of the plan, of measured memory and of reports."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    OTHER = "other"
