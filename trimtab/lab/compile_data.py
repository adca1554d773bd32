"""The record of torch.compile: graph breaks, compilations with their reasons, seconds. Imports no torch.

`trimtab.lab.compilation` records it; reports read it from JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trimtab.facts.errors import DataError


@dataclass(frozen=True)
class GraphBreak:
    """A graph break: a place in the source where torch could not continue tracing and split the graph."""

    place: str
    """file:line"""
    reason: str
    count: int
    """Number of occurrences, in compilations and recompilations."""


@dataclass(frozen=True)
class Compilation:
    """The compilation or recompilation of a function."""

    function: str
    place: str
    """file:line of the function"""
    reason: str
    """The guard that failed and caused a recompilation; empty for the first compilation."""
    seconds: float
    """Of compiling its forward and backward pass."""
    operations: int
    """In its graph; 0 if the graph breaks before the first one."""

    @property
    def is_recompilation(self) -> bool:
        """Whether the function had been compiled before, for other inputs."""
        return bool(self.reason)


@dataclass(frozen=True)
class CompileLog:
    """All compilations of a run."""

    graphs: int
    """Graphs that the backend compiled."""
    seconds: float
    breaks: tuple[GraphBreak, ...]
    compilations: tuple[Compilation, ...]
    cached: int = 0
    """Graphs whose code came from the cache on disk."""

    @property
    def recompilations(self) -> tuple[Compilation, ...]:
        """Compilations with a reason.

        Example:
            >>> once = Compilation("forward", "model.py:3", "", 1.0, 40)
            >>> CompileLog(1, 1.0, (), (once,)).recompilations
            ()
        """
        return tuple(compilation for compilation in self.compilations if compilation.is_recompilation)

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON.

        Example:
            >>> log = CompileLog(2, 1.5, (GraphBreak("a.py:3", "print", 1),), ())
            >>> CompileLog.from_dict(log.to_dict()) == log
            True
        """
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> CompileLog:
        """Inverse of `to_dict`; raises DataError if the record is damaged."""
        try:
            return CompileLog(
                int(data["graphs"]),
                float(data["seconds"]),
                tuple(GraphBreak(**entry) for entry in data["breaks"]),
                tuple(Compilation(**entry) for entry in data["compilations"]),
                int(data["cached"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"a record of compilations is damaged: {type(error).__name__}: {error}",
                "measure it again with --remeasure",
            ) from None
