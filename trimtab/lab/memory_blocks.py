"""The memory of a run block by block: role, lifetime and source line of each allocation. Imports no torch.

`memory_recorder.py` creates blocks; `memory_summary.py` reduces them to the figures of a report.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.facts.files import write_atomic
from trimtab.facts.operations import MemoryPart
from trimtab.facts.phases import RunPhase
from trimtab.facts.tensor_kinds import TensorKind


@dataclass(frozen=True)
class Role:
    """The role of a block: its bucket and, for activations, the part."""

    kind: TensorKind
    part: MemoryPart | None = None

    @property
    def name(self) -> str:
        """The name in tables and charts.

        Example:
            >>> Role(TensorKind.OPTIMIZER).name, Role(TensorKind.ACTIVATIONS, MemoryPart.LOSS).name
            ('optimizer states', 'loss')
        """
        if self.part is not None:
            return self.part.value
        return "optimizer states" if self.kind is TensorKind.OPTIMIZER else self.kind.value


ROLES = (
    Role(TensorKind.WEIGHTS),
    Role(TensorKind.OPTIMIZER),
    Role(TensorKind.GRADIENTS),
    *(Role(TensorKind.ACTIVATIONS, part) for part in MemoryPart),
    Role(TensorKind.ACTIVATIONS),
    Role(TensorKind.OTHER),
)
"""All roles, from the bottom of a stacked chart to its top."""


@dataclass(frozen=True)
class MemoryBlock:
    """One allocation.

    Example:
        >>> MemoryBlock(4096, Role(TensorKind.WEIGHTS), name="lm_head.weight").exists_at(7)
        True
    """

    nbytes: int
    """As the allocator counts them: rounded up on a GPU."""
    role: Role
    name: str = ""
    """A parameter's name, an operation with the tensor's shape and dtype, or scratch of an operation."""
    module: str | None = None
    line: str | None = None
    """`file:line (function)`."""
    phase: RunPhase | None = None
    """Phase of the allocation; None if it was allocated before the run."""
    tensor_bytes: int | None = None
    """Bytes of the tensor in it; None if it is unknown."""
    start: int | None = None
    """The number of the event that allocated it; None if it was allocated before the run."""
    end: int | None = None
    """The number of the event that released it; None if it was not released during the run."""
    address: int = 0

    def exists_at(self, event: int) -> bool:
        """Whether it is allocated after the event of that number."""
        return (self.start is None or self.start <= event) and (self.end is None or event < self.end)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {
            "address": self.address,
            "bytes": self.nbytes,
            "tensor_bytes": self.tensor_bytes,
            "bucket": self.role.kind.value,
            "part": None if self.role.part is None else self.role.part.value,
            "name": self.name,
            "module": self.module,
            "line": self.line,
            "phase": None if self.phase is None else self.phase.value,
            "start": self.start,
            "end": self.end,
        }


@dataclass(frozen=True)
class MemoryPoint:
    """Memory after one event."""

    event: int
    """Its number; -1 before the first."""
    roles: dict[Role, int]

    @property
    def total(self) -> int:
        """Bytes of all roles."""
        return sum(self.roles.values())

    def by_kind(self) -> dict[TensorKind, int]:
        """Bytes of each bucket."""
        totals = dict.fromkeys(TensorKind, 0)
        for role, nbytes in self.roles.items():
            totals[role.kind] += nbytes
        return totals


@dataclass(frozen=True)
class PhaseSpan:
    """Events of one phase: `end` is exclusive."""

    phase: RunPhase
    start: int
    end: int


@dataclass(frozen=True)
class AttributedTimeline:
    """All blocks of a run, including those allocated before it, and its phases.

    Example:
        >>> weights = MemoryBlock(8, Role(TensorKind.WEIGHTS))
        >>> made = MemoryBlock(4, Role(TensorKind.OTHER), start=0, end=1)
        >>> timeline = AttributedTimeline((weights, made), (PhaseSpan(RunPhase.FORWARD, 0, 2),), num_events=2)
        >>> timeline.peak.total, timeline.before.total, [moment.total for moment in timeline.moments()]
        (12, 8, [8, 12, 8])
    """

    blocks: tuple[MemoryBlock, ...]
    phases: tuple[PhaseSpan, ...]
    num_events: int

    def moments(self) -> Iterator[MemoryPoint]:
        """Memory before the first event and after each one."""
        changes: list[list[tuple[Role, int]]] = [[] for _ in range(self.num_events)]
        level = dict.fromkeys(ROLES, 0)
        for block in self.blocks:
            if block.start is None:
                level[block.role] += block.nbytes
            else:
                changes[block.start].append((block.role, block.nbytes))
            if block.end is not None:
                changes[block.end].append((block.role, -block.nbytes))
        yield MemoryPoint(-1, dict(level))
        for event, changed in enumerate(changes):
            for role, nbytes in changed:
                level[role] += nbytes
            yield MemoryPoint(event, dict(level))

    @property
    def before(self) -> MemoryPoint:
        """Memory before the first event."""
        return next(self.moments())

    @property
    def peak(self) -> MemoryPoint:
        """The first moment with the most allocated bytes."""
        return max(self.moments(), key=lambda moment: moment.total)

    def phase_at(self, event: int) -> RunPhase | None:
        """The phase of an event; None before the first."""
        return next((span.phase for span in self.phases if span.start <= event < span.end), None)

    def alive_at(self, event: int) -> list[MemoryBlock]:
        """The blocks that are allocated after an event."""
        return [block for block in self.blocks if block.exists_at(event)]

    def write(self, path: Path) -> None:
        """Writes every block as JSON: trimtab's own snapshot, which is no pickle."""
        plain = {
            "events": self.num_events,
            "phases": [{**dataclasses.asdict(span), "phase": span.phase.value} for span in self.phases],
            "blocks": [block.to_dict() for block in self.blocks],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(plain))


def spans(phases: Sequence[RunPhase]) -> tuple[PhaseSpan, ...]:
    """Groups consecutive events of the same phase.

    Example:
        >>> [(one.phase.value, one.start, one.end) for one in spans([RunPhase.LOSS, RunPhase.LOSS, RunPhase.BACKWARD])]
        [('loss', 0, 2), ('backward', 2, 3)]
    """
    spans: list[PhaseSpan] = []
    for event, phase in enumerate(phases):
        if spans and spans[-1].phase is phase:
            spans[-1] = dataclasses.replace(spans[-1], end=event + 1)
        else:
            spans.append(PhaseSpan(phase, event, event + 1))
    return tuple(spans)
