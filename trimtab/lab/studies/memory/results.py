"""What the memory study records of a cell. Imports no torch: the report reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trimtab.facts.errors import DataError
from trimtab.facts.operations import Part
from trimtab.facts.phases import RunPhase
from trimtab.facts.tensor_kinds import TensorKind
from trimtab.lab.memory_blocks import Role
from trimtab.lab.memory_summary import FoundSize, MemorySummary


@dataclass(frozen=True)
class ResidualStream:
    """One tensor of the residual stream: its bytes computed, and how many allocations of that size there were."""

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
        """Allocations of exactly that size."""
        return sum(one.count for one in self.found)

    @property
    def own(self) -> int:
        """Those of them that are the stream itself, not a norm, a projection or a gradient of the same size."""
        stream = Role(TensorKind.ACTIVATIONS, Part.RESIDUAL).name
        return sum(
            one.count for one in self.found if one.role == stream and one.phase == RunPhase.FORWARD.value
        )


@dataclass(frozen=True)
class Allocator:
    """Of torch's CUDA allocator, in bytes: what it took from the GPU beyond what tensors need."""

    reserved_peak: int
    segments: int
    largest_free_block: int
    """Between allocated ones, after the run."""


@dataclass(frozen=True)
class MemoryResult:
    """One cell."""

    parameters: int
    measured_peak: int
    """Of a run that was not recorded, in bytes: allocated before, and above that at the peak."""
    memory: MemorySummary
    residual: ResidualStream
    predicted_peak: int | None
    """By `trimtab.plan`, where it has this configuration."""
    allocator: Allocator | None
    """On a GPU."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @staticmethod
    def from_dict(record: Mapping[str, Any]) -> MemoryResult:
        """Raises DataError for what `to_dict` did not write."""
        try:
            stream = record["residual"]
            found = tuple(FoundSize(**one) for one in stream["found"])
            residual = ResidualStream(**{**stream, "found": found})
            allocator = None if record["allocator"] is None else Allocator(**record["allocator"])
            memory = MemorySummary.from_dict(record["memory"])
            return MemoryResult(**{**record, "residual": residual, "allocator": allocator, "memory": memory})
        except (KeyError, TypeError) as error:
            raise DataError(
                f"a record of the memory study is damaged: {type(error).__name__}: {error}",
                "measure it with --again",
            ) from None
