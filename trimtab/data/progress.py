"""What the data room reports while it works, for a progress bar."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Progress:
    """One report: the stage, how far it is, and a message where something happened worth a line."""

    stage: Literal["hash", "tokenize", "verify", "message"]
    source: str
    done_bytes: int = 0
    total_bytes: int = 0
    documents: int = 0
    tokens: int = 0
    message: str | None = None


ProgressCallback = Callable[[Progress], None]


def silent(progress: Progress) -> None:
    """Reports to nobody."""
