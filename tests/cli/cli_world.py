"""Types shared by the tests of the command line: a trained run, and the result of a command."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class World:
    """The files and output of the session's run; tests must not change them."""

    folder: Path
    recipe: Path
    model: Path
    run: Path
    output: str


@dataclass(frozen=True)
class CommandResult:
    """Exit code and output of a command."""

    code: int
    out: str
    err: str

    def refused(self, code: int, *words: str) -> None:
        """Asserts a user error: the exit code, one error line that contains `words`, no traceback, no escapes."""
        assert self.code == code, (self.code, self.out, self.err)
        assert "Traceback" not in self.out + self.err
        lines = self.err.strip().splitlines()
        assert lines, self.out
        details = lines[::-1]
        while details[0].startswith("  "):  # the details of an error are indented below it
            del details[0]
        assert details[0].startswith("error: ") or lines[0].startswith("error: "), self.err
        assert len([line for line in lines if line.startswith("error")]) == 1
        assert "\x1b" not in self.err
        for word in words:
            assert word in self.err, (word, self.err)


Call = Callable[..., CommandResult]
