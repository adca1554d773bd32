"""Recordings as JSON lines, written per case, so that an interrupted recording resumes where it stopped."""

from __future__ import annotations

import fcntl
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Recording:
    """The recorded values of a case with one commit."""

    case: str
    commit: str
    values: dict[str, str] = field(default_factory=dict)
    """Exact text by name, in the order of recording."""
    error: str | None = None
    """Why the case failed; its values are those before."""
    seconds: float = 0.0
    choices: dict[str, Any] = field(default_factory=dict)
    """Which code ran, for the reader; not compared."""

    @property
    def steps(self) -> int:
        """Optimizer steps that were logged."""
        return sum(name.startswith("step ") and name.endswith(" grad_norm") for name in self.values)


def append(file: Path, recording: Recording) -> None:
    """Append a line; safe for concurrent processes."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as out:
        fcntl.flock(out, fcntl.LOCK_EX)
        out.write(json.dumps(asdict(recording)) + "\n")


def read(file: Path, commit: str) -> dict[str, Recording]:
    """A commit's recordings by case; incomplete lines are ignored, and the last line of a case counts."""
    found: dict[str, Recording] = {}
    if not file.exists():
        return found
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            recording = Recording(**json.loads(line))
        except json.JSONDecodeError:
            continue
        if recording.commit == commit:
            found[recording.case] = recording
    return found
