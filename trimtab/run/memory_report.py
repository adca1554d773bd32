"""The report of a failed allocation, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from trimtab.facts.phases import RunPhase
from trimtab.facts.units import format_bytes
from trimtab.run.live_tensors import UNKNOWN, LiveTensor, Origin
from trimtab.run.memory_state import MemoryState

VERSION = 1


@dataclass(frozen=True)
class PredictedMemory:
    """The plan's prediction, in bytes."""

    allocated: int
    """Peak of allocated tensors, of a step or of the command."""
    moment: str
    """When the peak is reached."""
    process: int
    """Peak memory of the whole process."""
    buckets: dict[str, int]
    """By kind of tensor, at the peak of the phase that failed, or of a step if the plan does not cover that phase."""
    phase_allocated: int | None = None
    """Peak of allocated tensors in the phase that failed; None if the plan does not cover it."""
    host: int | None = None
    """Host memory of the process in that phase."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {"phase" if name == "phase_allocated" else name: value for name, value in asdict(self).items()}


@dataclass(frozen=True)
class MemoryReport:
    """A failed allocation and the memory at that moment. `to_dict()` is oom.json."""

    phase: RunPhase
    state: MemoryState
    message: str
    """First line of the exception's message."""
    step: int | None = None
    """The current optimizer step, counted from 1; None outside of training."""
    requested_at: Origin = UNKNOWN
    """The module and the line that requested the memory."""
    buckets: dict[str, int] | None = None
    """Bytes of live tensors by kind; None where they could not be listed."""
    tensors: tuple[LiveTensor, ...] = ()
    """The largest live tensors."""
    recorded: bool = False
    """Whether the lines that allocate tensors were recorded."""
    predicted: PredictedMemory | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; every number in bytes."""
        return {
            "version": VERSION,
            "phase": self.phase.name.lower(),
            "step": self.step,
            "message": self.message,
            "asked": asdict(self.requested_at),
            "memory": self.state.to_dict(),
            "predicted": None if self.predicted is None else self.predicted.to_dict(),
            "buckets": self.buckets,
            "recorded": self.recorded,
            "tensors": [tensor.to_dict() for tensor in self.tensors],
        }


def describe_failure(report: MemoryReport) -> str:
    """The first line of the error: phase, step, amount and device."""
    step = f" of step {report.step}" if report.step is not None else ""
    place = report.state.device if report.state.on_gpu else "the host"
    amount = report.state.requested
    wanted = f": {format_bytes(amount)} more could not be allocated on {place}" if amount else f", on {place}"
    return f"out of memory {report.phase.describe()}{step}{wanted}"
