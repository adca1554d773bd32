"""The result types of `trimtab profile`. Imports no torch: the report reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trimtab.lab.memory_summary import MemorySummary
from trimtab.lab.profile_data import Profile
from trimtab.lab.step_times import StepTimes
from trimtab.lab.suggestions import Suggestion


@dataclass(frozen=True)
class ProfiledJob:
    """The profiled recipe with every `auto` resolved."""

    model: str
    parameters: int
    trained: int
    batch: int
    tokens: int
    accumulation: int
    packed: bool
    dtype: str
    """Dtype of the products."""
    settings: Mapping[str, str]
    """Resolved settings, in words."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step."""
        return self.batch * self.tokens * self.accumulation


@dataclass(frozen=True)
class OperationRow:
    """Seconds of one declared operation in one microbatch, all layers together."""

    name: str
    forward: float
    recompute: float
    backward: float
    predicted: float | None
    """Sum of all phases; None if the plan has no rates, or no such operation."""

    @property
    def measured(self) -> float:
        """Sum of all phases."""
        return self.forward + self.recompute + self.backward


@dataclass(frozen=True)
class Ceiling:
    """The peak FLOP/s of a device, and the source of the figure."""

    flops_per_second: float
    source: str
    dtype: str
    """Dtype of the products that reach it."""
    is_data_sheet: bool
    """Whether it is from the vendor's data sheet; otherwise it was measured with a large product."""


@dataclass(frozen=True)
class PredictedStep:
    """The plan's time of an optimizer step."""

    seconds: float
    low_seconds: float
    high_seconds: float
    update_seconds: float
    basis: str


@dataclass(frozen=True)
class PredictedPeak:
    """The plan's memory at the peak, in bytes."""

    buckets: Mapping[str, int]
    total: int
    moment: str
    outside: int
    """Memory of the process outside tensors."""
    limit: int
    """The memory limit of the run."""


@dataclass(frozen=True)
class Details:
    """Measurements under the profiler, without torch.compile and CUDA graphs."""

    kernels: Profile
    operations: tuple[OperationRow, ...]
    attributed: float
    """The share of forward and backward time that is attributed to an operation."""
    memory: MemorySummary
    microbatches: int
    """Microbatches of the recorded step."""


@dataclass(frozen=True)
class ProfileResult:
    """All measurements and predictions of a recipe's step."""

    job: ProfiledJob
    times: StepTimes
    """Times of whole optimizer steps, as the recipe runs them."""
    update: StepTimes | None
    """Times of the optimizer alone; None if it is part of the backward pass."""
    model_flops: float
    """FLOPs of an optimizer step, without recomputation."""
    ceiling: Ceiling
    predicted_step: PredictedStep | None
    time_basis: str
    """The source of predicted times, or the reason why there are none."""
    peak_bytes: int
    """Peak bytes of tensors in the timed steps."""
    predicted_peak: PredictedPeak
    details: Details | None
    """None with --nvtx, which runs no profiler."""
    suggestions: tuple[Suggestion, ...]
    notes: tuple[str, ...]

    @property
    def step_seconds(self) -> float:
        """Median seconds of an optimizer step."""
        return self.times.host.median_ms / 1e3

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second, by the median step."""
        return self.job.tokens_per_step / self.step_seconds

    @property
    def ceiling_share(self) -> float:
        """Model FLOPs divided by the FLOPs that the device could do in the same time."""
        return self.model_flops / self.step_seconds / self.ceiling.flops_per_second

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: the share of the data sheet's rate; None without a data sheet."""
        return self.ceiling_share if self.ceiling.is_data_sheet else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        details = self.details
        return {
            "job": {**asdict(self.job), "tokens_per_step": self.job.tokens_per_step},
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "ceiling_share": self.ceiling_share,
            "times": self.times.to_dict(),
            "update": None if self.update is None else self.update.to_dict(),
            "model_flops": self.model_flops,
            "ceiling": asdict(self.ceiling),
            "predicted_step": None if self.predicted_step is None else asdict(self.predicted_step),
            "time_basis": self.time_basis,
            "peak_bytes": self.peak_bytes,
            "predicted_peak": asdict(self.predicted_peak),
            "kernels": None if details is None else details.kernels.to_dict(),
            "operations": [] if details is None else [asdict(item) for item in details.operations],
            "memory": None if details is None else details.memory.to_dict(),
            "suggestions": [item.to_dict() for item in self.suggestions],
            "notes": list(self.notes),
        }
