"""The memory of a run block by block: what each allocation is for, when it lived and where it was made. No torch.

`memory_recorder.py` makes these; `memory_summary.py` reduces them to what a report shows.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.facts.files import write_atomic
from trimtab.facts.operations import Part
from trimtab.facts.phases import RunPhase
from trimtab.facts.tensor_kinds import TensorKind


@dataclass(frozen=True)
class Role:
    """What memory is for: a bucket, and of activations the part."""

    kind: TensorKind
    part: Part | None = None

    @property
    def name(self) -> str:
        """In tables and charts.

        Example:
            >>> Role(TensorKind.OPTIMIZER).name, Role(TensorKind.ACTIVATIONS, Part.LOSS).name
            ('optimizer states', 'loss')
        """
        if self.part is not None:
            return self.part.value
        return "optimizer states" if self.kind is TensorKind.OPTIMIZER else self.kind.value


ROLES = (
    Role(TensorKind.WEIGHTS),
    Role(TensorKind.OPTIMIZER),
    Role(TensorKind.GRADIENTS),
    *(Role(TensorKind.ACTIVATIONS, part) for part in Part),
    Role(TensorKind.ACTIVATIONS),
    Role(TensorKind.OTHER),
)
"""All of them, from the bottom of a stack to its top."""


@dataclass(frozen=True)
class Block:
    """One allocation.

    Example:
        >>> Block(4096, Role(TensorKind.WEIGHTS), name="lm_head.weight").exists_at(7)
        True
    """

    nbytes: int
    """As the allocator counts them: on a GPU rounded up."""
    role: Role
    name: str = ""
    """What it is: a parameter, a tensor with its shape and format, scratch of an operation."""
    module: str | None = None
    line: str | None = None
    """`file:line (function)`."""
    phase: RunPhase | None = None
    """In which it was made; None where it was there before."""
    tensor_bytes: int | None = None
    """Of the tensor in it; None where none is known."""
    start: int | None = None
    """The number of the event that allocated it; None where it was there before."""
    end: int | None = None
    """The number of the event that released it; None where it was there afterwards."""
    address: int = 0

    def exists_at(self, event: int) -> bool:
        """Whether it is there after an event of that number."""
        return (self.start is None or self.start <= event) and (self.end is None or event < self.end)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
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
class Moment:
    """Memory after one event."""

    event: int
    """Its number; -1 before the first."""
    roles: dict[Role, int]

    @property
    def total(self) -> int:
        """All roles together."""
        return sum(self.roles.values())

    def by_kind(self) -> dict[TensorKind, int]:
        """The buckets."""
        found = dict.fromkeys(TensorKind, 0)
        for role, nbytes in self.roles.items():
            found[role.kind] += nbytes
        return found


@dataclass(frozen=True)
class PhaseSpan:
    """Events of one phase, from the first to the one behind the last."""

    phase: RunPhase
    start: int
    end: int


@dataclass(frozen=True)
class AttributedTimeline:
    """All blocks of a run, those that were there before it included, and its phases.

    Example:
        >>> weights, made = Block(8, Role(TensorKind.WEIGHTS)), Block(4, Role(TensorKind.OTHER), start=0, end=1)
        >>> timeline = AttributedTimeline((weights, made), (PhaseSpan(RunPhase.FORWARD, 0, 2),), num_events=2)
        >>> timeline.peak.total, timeline.before.total, [moment.total for moment in timeline.moments()]
        (12, 8, [8, 12, 8])
    """

    blocks: tuple[Block, ...]
    phases: tuple[PhaseSpan, ...]
    num_events: int

    def moments(self) -> Iterator[Moment]:
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
        yield Moment(-1, dict(level))
        for event, changed in enumerate(changes):
            for role, nbytes in changed:
                level[role] += nbytes
            yield Moment(event, dict(level))

    @property
    def before(self) -> Moment:
        """Memory before the first event."""
        return next(self.moments())

    @property
    def peak(self) -> Moment:
        """The first moment at which most bytes are allocated."""
        return max(self.moments(), key=lambda moment: moment.total)

    def phase_at(self, event: int) -> RunPhase | None:
        """The phase of an event; None before the first."""
        return next((one.phase for one in self.phases if one.start <= event < one.end), None)

    def alive_at(self, event: int) -> list[Block]:
        """The blocks that are there after an event."""
        return [block for block in self.blocks if block.exists_at(event)]

    def write(self, path: Path) -> None:
        """Every block as JSON: this library's own snapshot, which needs no pickle to be read."""
        plain = {
            "events": self.num_events,
            "phases": [{**dataclasses.asdict(one), "phase": one.phase.value} for one in self.phases],
            "blocks": [block.to_dict() for block in self.blocks],
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(plain))


def spans(phases: Sequence[RunPhase]) -> tuple[PhaseSpan, ...]:
    """The phase of each event as stretches of equal ones.

    Example:
        >>> [(one.phase.value, one.start, one.end) for one in spans([RunPhase.LOSS, RunPhase.LOSS, RunPhase.BACKWARD])]
        [('loss', 0, 2), ('backward', 2, 3)]
    """
    found: list[PhaseSpan] = []
    for event, phase in enumerate(phases):
        if found and found[-1].phase is phase:
            found[-1] = dataclasses.replace(found[-1], end=event + 1)
        else:
            found.append(PhaseSpan(phase, event, event + 1))
    return tuple(found)
