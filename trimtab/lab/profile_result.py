"""What `trimtab profile` measures of a recipe. Imports no torch: the report is made of it."""

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
    """What was profiled: the recipe with every `auto` decided."""

    model: str
    parameters: int
    trained: int
    batch: int
    tokens: int
    accumulation: int
    packed: bool
    dtype: str
    """Of the products."""
    settings: Mapping[str, str]
    """What each `auto` came to, in words."""

    @property
    def tokens_per_step(self) -> int:
        """Of an optimizer step."""
        return self.batch * self.tokens * self.accumulation


@dataclass(frozen=True)
class OperationRow:
    """Seconds of one declared operation in one microbatch, all layers together."""

    name: str
    forward: float
    recompute: float
    backward: float
    predicted: float | None
    """All phases together; None where the plan has no rates, or no such operation."""

    @property
    def measured(self) -> float:
        """All phases together."""
        return self.forward + self.recompute + self.backward


@dataclass(frozen=True)
class Ceiling:
    """FLOP/s that a device can do, and where the figure is from."""

    flops_per_second: float
    source: str
    dtype: str
    """Of the products that reach it."""
    is_data_sheet: bool
    """Whether a vendor promises it; otherwise it was measured with a large product."""


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
    """Of the process besides tensors."""
    limit: int
    """What the run may take."""


@dataclass(frozen=True)
class Details:
    """What is measured under the profiler, without torch.compile and CUDA graphs."""

    kernels: Profile
    operations: tuple[OperationRow, ...]
    attributed: float
    """The share of the time of forward and backward that has the name of an operation."""
    memory: MemorySummary
    microbatches: int
    """Of the recorded step."""


@dataclass(frozen=True)
class ProfileResult:
    """Everything that is known of a recipe's step."""

    job: ProfiledJob
    times: StepTimes
    """Of whole optimizer steps, as the recipe runs them."""
    update: StepTimes | None
    """Of the optimizer alone; None where it is part of the backward pass."""
    model_flops: float
    """Of an optimizer step, without recomputation."""
    ceiling: Ceiling
    predicted_step: PredictedStep | None
    time_basis: str
    """Where predicted times come from, or why there are none."""
    peak_bytes: int
    """Of tensors, in the timed steps."""
    predicted_peak: PredictedPeak
    details: Details | None
    """None where only NVTX ranges were asked for."""
    suggestions: tuple[Suggestion, ...]
    notes: tuple[str, ...]

    @property
    def step_seconds(self) -> float:
        """The median."""
        return self.times.host.median_ms / 1e3

    @property
    def tokens_per_second(self) -> float:
        """In training, by the median step."""
        return self.job.tokens_per_step / self.step_seconds

    @property
    def ceiling_share(self) -> float:
        """FLOPs of the model's arithmetic over what the device could do in the time."""
        return self.model_flops / self.step_seconds / self.ceiling.flops_per_second

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: the share of what the device's data sheet promises; None without a data sheet."""
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
            "operations": [] if details is None else [asdict(one) for one in details.operations],
            "memory": None if details is None else details.memory.to_dict(),
            "suggestions": [one.to_dict() for one in self.suggestions],
            "notes": list(self.notes),
        }
