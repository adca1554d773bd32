"""What torch.compile did: graph breaks, compilations with their reasons, seconds. Imports no torch.

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
    """How often it was met, in compilations and in recompilations."""


@dataclass(frozen=True)
class Compilation:
    """One function, compiled or compiled again."""

    function: str
    place: str
    """file:line of the function"""
    reason: str
    """Why it was compiled again: the guard that failed; empty for the first time."""
    seconds: float
    """Of its forward and backward pass."""
    operations: int
    """In its graph; 0 of a function that breaks off before the first."""

    @property
    def is_again(self) -> bool:
        """Whether it had been compiled before, for other inputs."""
        return bool(self.reason)


@dataclass(frozen=True)
class CompileLog:
    """All that was compiled while something ran."""

    graphs: int
    """Programs that the backend was given."""
    seconds: float
    breaks: tuple[GraphBreak, ...]
    compilations: tuple[Compilation, ...]
    cached: int = 0
    """Graphs whose code came from the cache on the disk."""

    @property
    def recompilations(self) -> tuple[Compilation, ...]:
        """Those with a reason.

        Example:
            >>> once = Compilation("forward", "model.py:3", "", 1.0, 40)
            >>> CompileLog(1, 1.0, (), (once,)).recompilations
            ()
        """
        return tuple(one for one in self.compilations if one.is_again)

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
        """Raises DataError for what `to_dict` did not write."""
        try:
            return CompileLog(
                int(data["graphs"]),
                float(data["seconds"]),
                tuple(GraphBreak(**one) for one in data["breaks"]),
                tuple(Compilation(**one) for one in data["compilations"]),
                int(data["cached"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"a record of compilations is damaged: {type(error).__name__}: {error}",
                "measure it again with --again",
            ) from None
