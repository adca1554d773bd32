"""A study: cells that are measured one by one in worker processes, and a report of the measurements.

Each study is a package in `trimtab/lab/studies/` with three modules:

    cells.py     validates the options and returns the cells; imports no torch
    measure.py   `measure(settings)`: measures one cell, in a worker process
    report.py    `sections(measurements)`: tables and charts; imports no torch

`trimtab.lab.sweep` runs cells and records their measurements, `trimtab.lab.studies` lists all studies.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.facts.errors import DataError
from trimtab.report.document import Section


class CellOutcome(enum.Enum):
    """How the measurement of a cell ended. The report shows every outcome."""

    MEASURED = "measured"
    OUT_OF_MEMORY = "out of memory"
    PREDICTED_OUT_OF_MEMORY = "out of memory (predicted)"
    """Not tried: the cell needs more memory than the device has; `message` has both figures."""
    NOT_SUPPORTED = "not supported"
    """The device, torch or a backend does not support it; `message` has the reason."""
    TIMED_OUT = "timed out"
    FAILED = "failed"


FRESH = "fresh"
"""The setting of a cell that must run in a new process; it is a setting so that records contain it."""


class NotSupported(Exception):
    """Raised by `measure` if the machine does not support the cell's settings; its text is shown in the table."""


class PredictedOutOfMemory(Exception):
    """Raised by `measure` for a cell that is not tried because it cannot fit; its text has the memory it needs."""


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
        """Whether it must be measured in a new process: the setting `FRESH`.

        Example:
            >>> Cell("step", {"warm_up": 0, FRESH: True}).fresh, Cell("step", {"warm_up": 0}).fresh
            (True, False)
        """
        return bool(self.settings.get(FRESH, False))

    @property
    def key(self) -> str:
        """Identifies the cell: study and settings."""
        return f"{self.study} {json.dumps(dict(self.settings), sort_keys=True)}"

    @property
    def name(self) -> str:
        """The name in progress lines: the values of the settings, and the names of those that are true."""
        shown = [
            name if value is True else str(value)
            for name, value in self.settings.items()
            if value is not None
        ]
        return " ".join([self.study, *shown])


@dataclass(frozen=True)
class Machine:
    """The machine of a measurement. Measurements of different machines never share a table."""

    device: str
    versions: Mapping[str, str]

    @property
    def name(self) -> str:
        """Device and torch version, which identify a machine in reports."""
        version = self.versions.get("torch")
        return self.device if version is None else f"{self.device}, torch {version}"


@dataclass(frozen=True)
class Measurement:
    """The outcome of a cell; `result` is the return value of the study's `measure`."""

    cell: Cell
    outcome: CellOutcome
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
        """Inverse of `to_dict`; raises DataError if the record is damaged."""
        try:
            return Measurement(
                Cell(str(record["study"]), dict(record["settings"])),
                CellOutcome(record["outcome"]),
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
    """A study, for the command line and the suite.

    Args:
        name: name of its package and subcommand.
        title: title of its report.
        sections: returns the report's sections for measurements of one machine.
        measure: "module:function", imported only in the worker.
        in_process: whether cells run in the calling process: for a study that only counts and needs no torch.
    """

    name: str
    title: str
    sections: Callable[[Sequence[Measurement]], list[Section]]
    measure: str
    in_process: bool = False
