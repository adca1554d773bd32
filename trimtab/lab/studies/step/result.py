"""The typed settings and result of a timed step: `measure` writes them, the report reads them. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimtab.facts.shapes import ModelShape
from trimtab.lab.samples import damaged_record
from trimtab.lab.step_settings import Kernels, Loss, Mode, Precision, StepSettings, TimedPart
from trimtab.lab.step_times import StepTimes
from trimtab.lab.study import FRESH
from trimtab.model.spec import flops_per_token

BACKWARD_FLOPS = 2
"""Backward FLOPs per forward FLOP: each product has a backward product for the gradient of either factor."""


@dataclass(frozen=True)
class TimedStep:
    """The settings of a cell."""

    step: StepSettings
    mode: Mode
    part: TimedPart
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
            <TimedPart.FORWARD: 'forward'>
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
                part=TimedPart(settings["part"]),
                warm_up=int(settings["warm_up"]),
                steps=int(settings["steps"]),
                budget_s=None if budget is None else float(budget),
                fresh=bool(settings.get(FRESH, False)),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise damaged_record("settings", f"{type(error).__name__}: {error}") from None


@dataclass(frozen=True)
class StepResult:
    """Times of one part of a step, and the rates that they are compared with."""

    times: StepTimes
    tokens: int
    """Per step."""
    flops: float
    """Model FLOPs of the timed part of a step: products and causal attention, without recomputation."""
    parameters: int
    attention: str
    """The attention implementation."""
    threads: int
    """torch's threads on the host."""
    cpu_share: float | None
    """Share of the timed steps during which this process ran: below 1 if other programs used the processor. None on a
    GPU, where the host waits."""
    ceiling_flops: float
    """FLOP/s of a large product on this device, measured in the same process."""
    ceiling_dtype: str
    copy_bytes: float
    """Bytes per second of a large copy."""
    sheet_flops: float | None
    """FLOP/s by the device's data sheet for the step's dtype; None where there is none."""
    compile_seconds: float | None
    from_cache: bool
    difference: float | None
    """Relative difference of loss and gradient norms to eager mode; None where they were not compared."""
    compiled_alongside: int | None = None
    """If it was compiled by another process before: the number of processes that worked alongside that one."""

    @property
    def flops_per_s(self) -> float:
        """Achieved FLOP/s, by the mean time."""
        return 1e3 * self.flops / self.times.host.mean_ms

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second, by the mean time."""
        return 1e3 * self.tokens / self.times.host.mean_ms

    @property
    def ceiling_share(self) -> float:
        """Share of the measured rate of a large product."""
        return self.flops_per_s / self.ceiling_flops

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: the share of the data sheet's rate."""
        return None if self.sheet_flops is None else self.flops_per_s / self.sheet_flops

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {**vars(self), "times": self.times.to_dict()}

    @staticmethod
    def from_dict(record: Mapping[str, Any]) -> StepResult:
        """Inverse of `to_dict`; raises DataError if the record is damaged."""
        try:
            return StepResult(**{**record, "times": StepTimes.from_dict(record["times"])})
        except (KeyError, TypeError) as error:
            raise damaged_record("results", f"{type(error).__name__}: {error}") from None


def model_flops(shape: ModelShape, context: int, batch: int, part: TimedPart) -> float:
    """Model FLOPs of a part of one step; the optimizer's are not counted.

    Example:
        >>> from trimtab.lab.study_models import study_model
        >>> shape = study_model("small").shape()
        >>> round(model_flops(shape, 128, 4, TimedPart.FORWARD) / 1e9)
        125
        >>> model_flops(shape, 128, 4, TimedPart.FULL) == 3 * model_flops(shape, 128, 4, TimedPart.FORWARD)
        True
    """
    forward = batch * context * flops_per_token(shape, context, training=False)
    passes = {TimedPart.FORWARD: 1, TimedPart.BACKWARD: BACKWARD_FLOPS}.get(part, 1 + BACKWARD_FLOPS)
    return passes * forward
