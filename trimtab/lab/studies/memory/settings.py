"""Settings of the memory study's cells. Imports no torch."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimtab.lab.step_settings import Kernels, Loss, Precision, StepSettings


class MeasuredPass(enum.Enum):
    """The run whose memory is measured."""

    FORWARD = "forward"
    """Inference: nothing is saved for a backward pass, and there is no optimizer."""
    FULL = "full step"
    """Forward, backward and AdamW."""


@dataclass(frozen=True)
class MemorySettings:
    """The settings of a cell.

    Example:
        >>> MemorySettings(StepSettings("tiny", context=128, batch=4), MeasuredPass.FORWARD).to_dict()["pass"]
        'forward'
    """

    step: StepSettings
    part: MeasuredPass
    shape: str | None = None
    """Checksum of the shape of a model that is no study model."""
    snapshots: str | None = None
    """Folder for snapshots; None for no snapshots."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, as the settings of a cell."""
        step = self.step
        settings = {
            "size": step.size,
            "shape": self.shape,
            "context": step.context,
            "batch": step.batch,
            "precision": step.precision.value,
            "pass": self.part.value,
            "kernels": step.kernels.value,
            "loss": step.loss.value,
            "device": step.device,
            "snapshots": self.snapshots,
        }
        return {key: value for key, value in settings.items() if value is not None}

    @staticmethod
    def from_dict(settings: Mapping[str, Any]) -> MemorySettings:
        """Inverse of `to_dict`."""
        step = StepSettings(
            str(settings["size"]),
            int(settings["context"]),
            int(settings["batch"]),
            Precision(settings["precision"]),
            Kernels(settings["kernels"]),
            Loss(settings["loss"]),
            str(settings["device"]),
        )
        return MemorySettings(
            step, MeasuredPass(settings["pass"]), settings.get("shape"), settings.get("snapshots")
        )
