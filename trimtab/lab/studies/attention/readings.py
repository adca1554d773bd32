"""Measurements of attention, read and sorted for the report. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from trimtab.lab.studies.attention.results import AttentionResult
from trimtab.lab.studies.attention.settings import BACKENDS, AttentionSettings, Mode, is_weighted_sum
from trimtab.lab.study import CellOutcome, Measurement


@dataclass(frozen=True, order=True)
class Variant:
    """A column of the tables: a backend, eager or compiled."""

    position: int
    """Of the backend in `BACKENDS`."""
    compiled: bool

    @staticmethod
    def of(backend: str, mode: Mode = Mode.EAGER) -> Variant:
        """
        Example:
            >>> str(Variant.of("reference", Mode.COMPILED)), str(Variant.of("triton"))
            ('reference (plain), compiled', 'triton (own)')
        """
        return Variant(BACKENDS.index(backend), mode is Mode.COMPILED)

    @property
    def backend(self) -> str:
        """Its name."""
        return BACKENDS[self.position]

    def __str__(self) -> str:
        remark = {"reference": " (plain)", "triton": " (own)"}.get(self.backend, "")
        return f"{self.backend}{remark}{', compiled' if self.compiled else ''}"


@dataclass(frozen=True, order=True)
class Group:
    """The settings that all cells of a table share; its rows are lengths and head dimensions."""

    dtype: str
    batch: int
    heads: int
    visibility: str

    @property
    def title(self) -> str:
        """
        Example:
            >>> Group("bf16", 8, 1, "causal").title
            'bf16, batch 8, 1 head, causal'
        """
        heads = f"{self.heads} head{'s' if self.heads > 1 else ''}"
        return f"{self.dtype}, batch {self.batch}, {heads}, {self.visibility}"

    @property
    def slug(self) -> str:
        """The name in ids of charts."""
        return f"{self.dtype}-b{self.batch}-h{self.heads}-{self.visibility}"


@dataclass(frozen=True)
class Reading:
    """One cell's outcome with its typed settings and, where it was measured, its typed result."""

    settings: AttentionSettings
    outcome: CellOutcome
    result: AttentionResult | None
    message: str

    @property
    def variant(self) -> Variant:
        """The column of this cell in its table."""
        return Variant.of(self.settings.backend, self.settings.mode)

    @property
    def group(self) -> Group:
        """The settings that identify its table."""
        s = self.settings
        return Group(s.dtype, s.batch, s.heads, s.visibility.value)


class Readings:
    """All measurements of attention on one machine, looked up by their settings.

    If a cell was measured with different repetitions, the last measurement counts. If it was predicted to run out of
    memory and was tried all the same, the measured outcome counts.
    """

    def __init__(self, measurements: Iterable[Measurement]) -> None:
        self._found: dict[tuple[Group, int, int, Variant], Reading] = {}
        for measurement in measurements:
            if is_weighted_sum(measurement.cell.settings):
                continue
            settings = AttentionSettings.from_dict(measurement.cell.settings)
            measured = measurement.outcome is CellOutcome.MEASURED
            result = AttentionResult.from_dict(measurement.result) if measured else None
            reading = Reading(settings, measurement.outcome, result, measurement.message)
            key = (reading.group, settings.length, settings.head_dim, reading.variant)
            if settings.tried or key not in self._found:
                self._found[key] = reading

    @property
    def all(self) -> list[Reading]:
        """All readings, in the order of measurement."""
        return list(self._found.values())

    @property
    def groups(self) -> list[Group]:
        """All groups, in the order of measurement."""
        return list(dict.fromkeys(reading.group for reading in self.all))

    def find(self, group: Group, length: int, head_dim: int, variant: Variant) -> Reading | None:
        """The reading of one cell; None if it was not requested."""
        return self._found.get((group, length, head_dim, variant))

    def result(self, group: Group, length: int, head_dim: int, variant: Variant) -> AttentionResult | None:
        """The result of one cell; None where there is none."""
        reading = self.find(group, length, head_dim, variant)
        return None if reading is None else reading.result

    def lengths(self, group: Group) -> list[int]:
        """Sequence lengths of a group, ascending."""
        return sorted({reading.settings.length for reading in self.all if reading.group == group})

    def head_dims(self, group: Group) -> list[int]:
        """Head dimensions of a group, ascending."""
        return sorted({reading.settings.head_dim for reading in self.all if reading.group == group})

    def variants(self, group: Group) -> list[Variant]:
        """Variants that ran at least once or ran out of memory, in the order of `BACKENDS`."""
        ran = (CellOutcome.MEASURED, CellOutcome.OUT_OF_MEMORY, CellOutcome.PREDICTED_OUT_OF_MEMORY)
        return sorted(
            {reading.variant for reading in self.all if reading.group == group and reading.outcome in ran}
        )

    def unmeasured_cells(self) -> list[tuple[Variant, str, str, str]]:
        """(variant, dtypes, outcome, reason) of cells that did not run for another reason than memory, by reason."""
        dtypes_by_reason: dict[tuple[Variant, str, str], list[str]] = {}
        for reading in self.all:
            if reading.outcome in (CellOutcome.NOT_SUPPORTED, CellOutcome.FAILED, CellOutcome.TIMED_OUT):
                dtypes_by_reason.setdefault(
                    (reading.variant, reading.outcome.value, reading.message), []
                ).append(reading.settings.dtype)
        return [
            (variant, ", ".join(dict.fromkeys(dtypes)), outcome, message)
            for (variant, outcome, message), dtypes in sorted(
                dtypes_by_reason.items(), key=lambda item: item[0]
            )
        ]
