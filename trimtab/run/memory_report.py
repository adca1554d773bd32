"""What is known of an allocation that failed, as plain data."""

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
    """What the plan said, in bytes."""

    allocated: int
    """Tensors at the peak, of a step or of the command."""
    moment: str
    """When that is."""
    process: int
    """What the whole process needs."""
    buckets: dict[str, int]
    """At the peak of the phase that failed, or of a step where the plan does not know that phase."""
    phase: int | None = None
    """Tensors at the peak of the phase that failed; None where the plan does not know it."""
    host: int | None = None
    """Host memory of the process in that phase."""


@dataclass(frozen=True)
class MemoryReport:
    """Everything that is known of an allocation that failed. `to_dict()` is oom.json."""

    phase: RunPhase
    state: MemoryState
    message: str
    """The exception's own first line."""
    step: int | None = None
    """The optimizer step at work, from 1; None outside of training."""
    asked: Origin = UNKNOWN
    """The module and the line that asked for the memory."""
    buckets: dict[str, int] | None = None
    """Bytes of live tensors by kind; None where they could not be listed."""
    tensors: tuple[LiveTensor, ...] = ()
    """The largest."""
    recorded: bool = False
    """Whether the lines that made tensors were recorded."""
    predicted: PredictedMemory | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; every number in bytes."""
        return {
            "version": VERSION,
            "phase": self.phase.name.lower(),
            "step": self.step,
            "message": self.message,
            "asked": asdict(self.asked),
            "memory": self.state.to_dict(),
            "predicted": None if self.predicted is None else asdict(self.predicted),
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
