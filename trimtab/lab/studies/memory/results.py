"""The result types of the memory study. Imports no torch: the report reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trimtab.facts.errors import DataError
from trimtab.facts.operations import MemoryPart
from trimtab.facts.phases import RunPhase
from trimtab.facts.tensor_kinds import TensorKind
from trimtab.lab.memory_blocks import Role
from trimtab.lab.memory_summary import FoundSize, MemorySummary


@dataclass(frozen=True)
class ResidualStream:
    """One tensor of the residual stream: its computed bytes, and the allocations of that size."""

    batch: int
    context: int
    width: int
    element_bytes: int
    layers: int
    found: tuple[FoundSize, ...]

    @property
    def nbytes(self) -> int:
        """batch × context × d_model × bytes per element.

        Example:
            >>> ResidualStream(4, 128, 2560, 4, 32, ()).nbytes == 5 * 2**20
            True
        """
        return self.batch * self.context * self.width * self.element_bytes

    @property
    def count(self) -> int:
        """Number of allocations of exactly that size."""
        return sum(size.count for size in self.found)

    @property
    def own(self) -> int:
        """Number of them that are the stream itself, not a norm, a projection or a gradient of the same size."""
        stream = Role(TensorKind.ACTIVATIONS, MemoryPart.RESIDUAL).name
        return sum(
            size.count for size in self.found if size.role == stream and size.phase == RunPhase.FORWARD.value
        )


@dataclass(frozen=True)
class Allocator:
    """State of torch's CUDA caching allocator; sizes in bytes."""

    reserved_peak: int
    segments: int
    largest_free_block: int
    """Between allocated blocks, after the run."""


@dataclass(frozen=True)
class MemoryResult:
    """The result of a cell."""

    parameters: int
    measured_peak: int
    """Peak bytes of a run without the recorder, memory allocated before it included."""
    memory: MemorySummary
    residual: ResidualStream
    predicted_peak: int | None
    """Predicted by `trimtab.plan`; None for configurations that it does not cover."""
    allocator: Allocator | None
    """None on a CPU."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @staticmethod
    def from_dict(record: Mapping[str, Any]) -> MemoryResult:
        """Inverse of `to_dict`; raises DataError if the record is damaged."""
        try:
            stream = record["residual"]
            sizes = tuple(FoundSize(**size) for size in stream["found"])
            residual = ResidualStream(**{**stream, "found": sizes})
            allocator = None if record["allocator"] is None else Allocator(**record["allocator"])
            memory = MemorySummary.from_dict(record["memory"])
            return MemoryResult(**{**record, "residual": residual, "allocator": allocator, "memory": memory})
        except (KeyError, TypeError) as error:
            raise DataError(
                f"a record of the memory study is damaged: {type(error).__name__}: {error}",
                "measure it with --remeasure",
            ) from None
