"""Categories of a run's memory."""

from __future__ import annotations

import enum


class TensorKind(enum.Enum):
    """Category of memory in plans, measurements and reports."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    ACTIVATIONS = "activations"
    OTHER = "other"
