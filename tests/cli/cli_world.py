"""What the tests of the command line share: a trained run, and what a command said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class World:
    """What the session's one run left: tests must not change it."""

    folder: Path
    recipe: Path
    model: Path
    run: Path
    output: str


@dataclass(frozen=True)
class CommandResult:
    """How a command ended and what it said."""

    code: int
    out: str
    err: str

    def refused(self, code: int, *words: str) -> None:
        """A user's mistake: the right exit code, one or two plain lines, no traceback, no escapes."""
        assert self.code == code, (self.code, self.out, self.err)
        assert "Traceback" not in self.out + self.err
        lines = self.err.strip().splitlines()
        assert lines, self.out
        details = lines[::-1]
        while details[0].startswith("  "):  # what explains the error is indented below it
            del details[0]
        assert details[0].startswith("error: ") or lines[0].startswith("error: "), self.err
        assert len([line for line in lines if line.startswith("error")]) == 1
        assert "\x1b" not in self.err
        for word in words:
            assert word in self.err, (word, self.err)


Call = Callable[..., CommandResult]
