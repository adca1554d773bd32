"""What a run leaves behind, as objects."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trimtab.api.model import Model
    from trimtab.report import RunData


@dataclass(frozen=True)
class RunResult:
    """A finished (or interrupted) run."""

    folder: Path
    status: str
    step: int
    reason: str | None = None
    """Why it finished before its last step (early stopping); None if it did not."""

    def data(self) -> RunData:
        """Its metrics and plan, read back from the folder."""
        from trimtab.report import read_run

        return read_run(self.folder)

    def model(self, checkpoint: str | int = "latest") -> Model:
        """The trained model: the `latest` checkpoint, the `best`, or a step."""
        from trimtab.api.model import load

        return load(str(self.folder), checkpoint=checkpoint)
