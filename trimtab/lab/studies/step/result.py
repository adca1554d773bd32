"""The settings and the result of one timed step, typed: what `measure` writes and the report reads. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimtab.facts.shapes import ModelShape
from trimtab.lab.samples import damaged_record
from trimtab.lab.step_settings import Kernels, Loss, Mode, Part, Precision, StepSettings
from trimtab.lab.step_times import StepTimes
from trimtab.lab.study import FRESH
from trimtab.model.spec import flops_per_token

BACKWARD_FLOPS = 2
"""Per FLOP of the forward pass: each product has one for the gradient of either factor."""


@dataclass(frozen=True)
class TimedStep:
    """What one cell times."""

    step: StepSettings
    mode: Mode
    part: Part
    warm_up: int
    steps: int
    budget_s: float | None
    fresh: bool

    @staticmethod
    def from_settings(settings: Mapping[str, Any]) -> TimedStep:
        """From the settings of a cell; raises DataError for those of another study.

        Example:
            >>> from trimtab.lab.studies.step.cells import cells
            >>> cell = cells(device="cpu", sizes=["tiny"], contexts=[16])[0]
            >>> TimedStep.from_settings(cell.settings).part
            <Part.FORWARD: 'forward'>
        """
        try:
            step = StepSettings(
                size=str(settings["size"]),
                context=int(settings["context"]),
                batch=int(settings["batch"]),
                precision=Precision(settings["precision"]),
                kernels=Kernels(settings["kernels"]),
                loss=Loss(settings["loss"]),
                device=str(settings["device"]),
            )
            budget = settings["budget_s"]
            return TimedStep(
                step=step,
                mode=Mode(settings["mode"]),
                part=Part(settings["part"]),
                warm_up=int(settings["warm_up"]),
                steps=int(settings["steps"]),
                budget_s=None if budget is None else float(budget),
                fresh=bool(settings.get(FRESH, False)),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise damaged_record("settings", f"{type(error).__name__}: {error}") from None


@dataclass(frozen=True)
class StepResult:
    """Times of one part of a step, and what they are compared with."""

    times: StepTimes
    tokens: int
    """Per step."""
    flops: float
    """Model FLOPs per step of what was timed: products and causal attention, nothing recomputed."""
    parameters: int
    attention: str
    """The implementation."""
    threads: int
    """Of the host."""
    cpu_share: float | None
    """Of the time of the timed steps, how much of it this process ran: less than 1 where other programs took the
    processor. None on a GPU, whose host waits."""
    ceiling_flops: float
    """Per second, of a large product on this device, measured in the same process."""
    ceiling_dtype: str
    copy_bytes: float
    """Per second, of a large copy."""
    sheet_flops: float | None
    """Per second, by the device's data sheet for the step's format; None where there is none."""
    compile_seconds: float | None
    from_cache: bool
    difference: float | None
    """Of loss and gradient norms from eager mode's, relative; None where they were not compared."""

    @property
    def flops_per_s(self) -> float:
        """What was reached, by the mean time."""
        return 1e3 * self.flops / self.times.host.mean_ms

    @property
    def tokens_per_s(self) -> float:
        """What was reached, by the mean time."""
        return 1e3 * self.tokens / self.times.host.mean_ms

    @property
    def ceiling_share(self) -> float:
        """Of the measured rate of a large product."""
        return self.flops_per_s / self.ceiling_flops

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: the share of the data sheet's rate."""
        return None if self.sheet_flops is None else self.flops_per_s / self.sheet_flops

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for a record."""
        return {**vars(self), "times": self.times.to_dict()}

    @staticmethod
    def from_dict(record: Mapping[str, Any]) -> StepResult:
        """The result of a record; raises DataError where it is none."""
        try:
            return StepResult(**{**record, "times": StepTimes.from_dict(record["times"])})
        except (KeyError, TypeError) as error:
            raise damaged_record("results", f"{type(error).__name__}: {error}") from None


def model_flops(shape: ModelShape, context: int, batch: int, part: Part) -> float:
    """Model FLOPs of a part of one step; the optimizer's few are not counted.

    Example:
        >>> from trimtab.lab.study_models import study_model
        >>> shape = study_model("small").shape()
        >>> round(model_flops(shape, 128, 4, Part.FORWARD) / 1e9)
        125
        >>> model_flops(shape, 128, 4, Part.FULL) == 3 * model_flops(shape, 128, 4, Part.FORWARD)
        True
    """
    forward = batch * context * flops_per_token(shape, context, training=False)
    passes = {Part.FORWARD: 1, Part.BACKWARD: BACKWARD_FLOPS}.get(part, 1 + BACKWARD_FLOPS)
    return passes * forward
