"""What a study is: cells that are measured one by one in worker processes, and a report of the measurements.

A study is a package in `trimtab/lab/studies/` with the same three modules each time:

    cells.py     the options, checked, and the cells they ask for; imports no torch
    measure.py   `measure(settings)`: one cell, measured; runs in a worker process
    report.py    `sections(measurements)`: tables and charts; imports no torch

`trimtab.lab.sweep` runs cells and keeps their measurements, `trimtab.lab.studies` lists all studies.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.facts.errors import DataError
from trimtab.report.document import Section


class Outcome(enum.Enum):
    """How the measurement of a cell ended. Each of them is a result that the report shows."""

    MEASURED = "measured"
    OUT_OF_MEMORY = "out of memory"
    PREDICTED_OUT_OF_MEMORY = "out of memory (predicted)"
    """Not tried: what the cell is known to need is more than the device has; `message` has both."""
    NOT_SUPPORTED = "not supported"
    """The device, torch or a backend cannot do it; `message` says why."""
    TIMED_OUT = "timed out"
    FAILED = "failed"


FRESH = "fresh"
"""The setting of a cell that asks for a process of its own; a setting, so that records tell what it was."""


class NotSupported(Exception):
    """Raised by `measure` where the machine cannot do what the cell asks for; its text is shown in the table."""


class PredictedOutOfMemory(Exception):
    """Raised by `measure` for a cell that is not tried because it cannot fit; its text says what it would need."""


@dataclass(frozen=True)
class Cell:
    """One measurement to make: the study and its settings, plain JSON values that identify it.

    Example:
        >>> Cell("step", {"size": "small", "context": 128}).key
        'step {"context": 128, "size": "small"}'
    """

    study: str
    settings: Mapping[str, Any]

    @property
    def fresh(self) -> bool:
        """Whether it is measured in a new process, in which nothing has run yet: the setting `FRESH`.

        Example:
            >>> Cell("step", {"warm_up": 0, FRESH: True}).fresh, Cell("step", {"warm_up": 0}).fresh
            (True, False)
        """
        return bool(self.settings.get(FRESH, False))

    @property
    def key(self) -> str:
        """Equal for equal cells."""
        return f"{self.study} {json.dumps(dict(self.settings), sort_keys=True)}"

    @property
    def name(self) -> str:
        """In a line of progress: the values of the settings, and the names of those that are true."""
        shown = [
            name if value is True else str(value)
            for name, value in self.settings.items()
            if value is not None
        ]
        return " ".join([self.study, *shown])


@dataclass(frozen=True)
class Machine:
    """Where a measurement was made. Measurements of different machines never share a table."""

    device: str
    versions: Mapping[str, str]

    @property
    def name(self) -> str:
        """Device and torch's version: what readers need to tell two machines apart."""
        version = self.versions.get("torch")
        return self.device if version is None else f"{self.device}, torch {version}"


@dataclass(frozen=True)
class Measurement:
    """One cell's outcome; `result` has what the study's `measure` returned."""

    cell: Cell
    outcome: Outcome
    result: Mapping[str, Any]
    message: str
    seconds: float
    machine: Machine
    commit: str
    time: str

    def to_dict(self) -> dict[str, Any]:
        """One line of records.jsonl."""
        return {
            "study": self.cell.study,
            "settings": dict(self.cell.settings),
            "outcome": self.outcome.value,
            "result": dict(self.result),
            "message": self.message,
            "seconds": round(self.seconds, 3),
            "device": self.machine.device,
            "versions": dict(self.machine.versions),
            "commit": self.commit,
            "time": self.time,
        }

    @staticmethod
    def from_dict(record: Mapping[str, Any]) -> Measurement:
        """Raises DataError for a line that is no measurement."""
        try:
            return Measurement(
                Cell(str(record["study"]), dict(record["settings"])),
                Outcome(record["outcome"]),
                dict(record["result"]),
                str(record["message"]),
                float(record["seconds"]),
                Machine(str(record["device"]), dict(record["versions"])),
                str(record["commit"]),
                str(record["time"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"a record is damaged: {type(error).__name__}: {error}") from None


@dataclass(frozen=True)
class Study:
    """A study as the command line and the suite see it.

    Args:
        name: of its package and subcommand.
        title: of its report.
        sections: the report of measurements that were all made on one machine.
        measure: "module:function", imported in the worker alone.
        in_process: whether cells are measured in the calling process: of a study that counts, and needs no torch.
    """

    name: str
    title: str
    sections: Callable[[Sequence[Measurement]], list[Section]]
    measure: str
    in_process: bool = False
