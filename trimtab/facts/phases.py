"""Phases of a command, for planned and measured memory and for error messages."""

from __future__ import annotations

import enum
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext


class RunPhase(enum.Enum):
    """A phase of a run, from loading data to exporting the model.

    Example:
        >>> f"out of memory {RunPhase.BACKWARD.describe()}"
        'out of memory in the backward pass'
    """

    DATA = "data"
    LOAD = "loading"
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    OPTIMIZER_STEP = "optimizer step"
    EVALUATION = "evaluation"
    PROBE = "probe"
    GENERATION = "generation of samples"
    CHECKPOINT = "checkpoint"
    MERGE = "merge"
    EXPORT = "export"
    OTHER = "other"

    def describe(self) -> str:
        """Returns the phase in words, to follow "out of memory" in messages."""
        return _WHEN[self]


_WHEN = {
    RunPhase.DATA: "while reading the data",
    RunPhase.LOAD: "while loading the model",
    RunPhase.FORWARD: "in the forward pass",
    RunPhase.LOSS: "in the loss, at the end of the forward pass",
    RunPhase.BACKWARD: "in the backward pass",
    RunPhase.OPTIMIZER_STEP: "in the optimizer step",
    RunPhase.EVALUATION: "during evaluation",
    RunPhase.PROBE: "in the probe",
    RunPhase.GENERATION: "while generating text",
    RunPhase.CHECKPOINT: "while saving a checkpoint",
    RunPhase.MERGE: "while merging the adapter",
    RunPhase.EXPORT: "while exporting the model",
    RunPhase.OTHER: "between the phases of the command",
}

STEP_PHASES = (RunPhase.FORWARD, RunPhase.LOSS, RunPhase.BACKWARD, RunPhase.OPTIMIZER_STEP)
"""Phases of a training step."""

During = Callable[[RunPhase], AbstractContextManager[None]]
"""Returns the context manager of a phase, which adds the phase to errors that are raised inside it."""


def no_phase(phase: RunPhase) -> AbstractContextManager[None]:
    """A context manager for a phase that does not change errors.

    Example:
        >>> with no_phase(RunPhase.LOAD):
        ...     pass
    """
    return nullcontext()
