"""The result types of the compile study. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trimtab.facts.errors import DataError
from trimtab.lab.compile_data import CompileLog


@dataclass(frozen=True)
class Length:
    """One sequence length: relative differences to eager mode, and seconds of the first step."""

    tokens: int
    loss_difference: float
    gradient_difference: float
    """Of the global norm."""
    first_seconds: float
    """Compilation included."""


@dataclass(frozen=True)
class CompileResult:
    """The result of a cell."""

    cold: CompileLog
    """With an empty cache."""
    lengths: tuple[Length, ...]
    timed_tokens: int
    eager_ms: float
    """Forward and backward pass at `timed_tokens`: the median."""
    compiled_ms: float
    warm: CompileLog | None = None
    """In a second process, with the first one's cache; None if the backend generates no code."""

    @property
    def speedup(self) -> float:
        """Eager over compiled time of a step.

        Example:
            >>> CompileResult(CompileLog(1, 9.0, (), ()), (), 128, eager_ms=30.0, compiled_ms=20.0).speedup
            1.5
        """
        return self.eager_ms / self.compiled_ms if self.compiled_ms else 0.0

    def steps_to_break_even(self, seconds: float) -> float | None:
        """Steps after which a compilation of `seconds` breaks even; None if a step is not faster.

        Example:
            >>> CompileResult(CompileLog(1, 9.0, (), ()), (), 128, 30.0, 20.0).steps_to_break_even(9.0)
            900.0
        """
        gained = (self.eager_ms - self.compiled_ms) / 1e3
        return seconds / gained if gained > 0 else None

    @property
    def loss_difference(self) -> float:
        """The largest over all lengths."""
        return max((length.loss_difference for length in self.lengths), default=0.0)

    @property
    def gradient_difference(self) -> float:
        """The largest over all lengths."""
        return max((length.gradient_difference for length in self.lengths), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> CompileResult:
        """Inverse of `to_dict`; raises DataError if the record is damaged."""
        try:
            return CompileResult(
                CompileLog.from_dict(data["cold"]),
                tuple(Length(**length) for length in data["lengths"]),
                int(data["timed_tokens"]),
                float(data["eager_ms"]),
                float(data["compiled_ms"]),
                None if data["warm"] is None else CompileLog.from_dict(data["warm"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"a result is damaged: {type(error).__name__}: {error}", "measure it again with --remeasure"
            ) from None
