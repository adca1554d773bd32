"""Runs the cells of studies in worker processes and records each measurement as soon as it is made.

A worker that runs out of memory, crashes or takes too long is replaced, and the sweep continues with the next cell. A
stopped sweep continues where it ended: cells that this machine has measured with the same versions are skipped.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trimtab.facts.devices import host_cores
from trimtab.facts.errors import DataError
from trimtab.lab.cell_times import CellTimes
from trimtab.lab.records import Record, append_record, provenance, read_records, timestamp
from trimtab.lab.studies import TITLES, find_study
from trimtab.lab.study import Cell, CellOutcome, Machine, Measurement
from trimtab.lab.worker import measure_cell
from trimtab.lab.worker_process import WorkerProcess

RECORDS = "records.jsonl"
LOG = "worker.log"
"""The workers' output, tracebacks included."""
CELL_SECONDS = 600.0
"""Default time limit of a cell."""
UNFINISHED = (CellOutcome.FAILED, CellOutcome.TIMED_OUT)
"""Outcomes that the next sweep measures again."""
PACKAGES = ("torch", "triton", "trimtab")

Progress = Callable[[int, int, Cell, Measurement | None], None]
"""(finished cells, total cells, the cell, its measurement or None when it begins)."""


@dataclass(frozen=True)
class TimeLimit:
    """The time limit of a sweep.

    No cell begins that would end later, by its estimate, except for the first one, so that each command makes progress.
    A cell that still runs at the limit is stopped and not recorded: the next sweep measures it.
    """

    seconds: float
    times: CellTimes
    """Estimates the seconds of cells; the sweep adds those that it measures."""
    stopped: list[Cell] = field(default_factory=list)
    """The cell that was stopped at the limit, if there was one."""
    measured: list[Cell] = field(default_factory=list)
    """The cells that were measured within the limit."""


def run_sweep(
    cells: Sequence[Cell],
    folder: Path,
    *,
    device: str,
    progress: Progress | None = None,
    remeasure: bool = False,
    cell_seconds: float = CELL_SECONDS,
    limit: TimeLimit | None = None,
    commit: str | None = None,
) -> list[Measurement]:
    """Measures the cells that are not recorded yet; returns the measurements of all cells on this machine.

    Args:
        cells: cells of one or several studies, in the order of measurement.
        folder: folder of records.jsonl, to which each measurement is appended.
        device: cpu, cuda or cuda:N.
        progress: called before and after each cell.
        remeasure: also measure cells that have a record.
        cell_seconds: the time limit of one cell.
        limit: the time limit of the sweep; recorded cells are returned all the same.
        commit: commit of the code, if git does not know it.

    Example:
        >>> run_sweep(cells, Path("lab"), device="cpu")[0].outcome                   # doctest: +SKIP
        <CellOutcome.MEASURED: 'measured'>
    """
    origin = provenance(device, PACKAGES, commit)
    machine = _machine(device, origin)
    known = {} if remeasure else _known(cells, folder / RECORDS, machine)
    clock = _Clock(limit, known.values())
    measurements: list[Measurement] = []
    with WorkerProcess(device, folder / LOG) as worker:
        for number, cell in enumerate(cells):
            measurement = known.get(cell.key)
            if measurement is None:
                if not clock.allows(cell):
                    continue
                if progress is not None:
                    progress(number, len(cells), cell, None)
                answer, seconds = _answer(worker, cell, cell_seconds, clock.end)
                if answer["outcome"] == CellOutcome.TIMED_OUT.value and clock.remaining <= 0:
                    clock.stop(cell)
                    continue
                measurement = Measurement(
                    cell,
                    CellOutcome(answer["outcome"]),
                    answer["result"],
                    answer["message"],
                    seconds,
                    machine,
                    origin["commit"],
                    timestamp(),
                )
                append_record(folder / RECORDS, measurement.to_dict())
                clock.add(measurement)
            measurements.append(measurement)
            if progress is not None:
                progress(number + 1, len(cells), cell, measurement)
    return measurements


def _answer(worker: WorkerProcess, cell: Cell, seconds: float, end: float) -> tuple[dict[str, Any], float]:
    """(answer, seconds) of a cell, measured in a worker or, for a study that only counts, in this process."""
    study = find_study(cell.study)
    if not study.in_process:
        return worker.measure(study.measure, cell, seconds, end)
    start = time.perf_counter()
    answer = measure_cell(study.measure, dict(cell.settings))
    return answer, time.perf_counter() - start


class _Clock:
    """The time that remains of a sweep, and the cells that fit into it."""

    def __init__(self, limit: TimeLimit | None, known: Iterable[Measurement]) -> None:
        self._limit = limit
        self.end = math.inf if limit is None else time.perf_counter() + limit.seconds
        """When the limit is reached, by `time.perf_counter`."""
        self._is_first = True
        for measurement in known:
            self.observe(measurement)

    @property
    def remaining(self) -> float:
        """Seconds until the limit."""
        return self.end - time.perf_counter()

    def allows(self, cell: Cell) -> bool:
        """Whether a cell may begin."""
        if self._limit is None:
            return True
        if self.remaining <= 0 or (not self._is_first and self._limit.times.seconds(cell) > self.remaining):
            return False
        self._is_first = False
        return True

    def observe(self, measurement: Measurement) -> None:
        """Corrects the estimates by a measured cell."""
        if self._limit is not None:
            self._limit.times.observe(measurement)

    def add(self, measurement: Measurement) -> None:
        """Notes a cell that was measured within the limit."""
        if self._limit is not None:
            self._limit.measured.append(measurement.cell)
        self.observe(measurement)

    def stop(self, cell: Cell) -> None:
        """Notes that a cell was stopped at the limit."""
        assert self._limit is not None
        self._limit.stopped.append(cell)


def read_measurements(paths: Iterable[Path]) -> tuple[list[Measurement], int]:
    """(the latest measurement of each cell on each machine, number of damaged lines) of record files or folders.

    Raises:
        DataError: a path is missing, or has no measurement.
    """
    latest: dict[tuple[str, str], Measurement] = {}
    damaged = 0
    for path in paths:
        for file in record_files(path):
            measurements, torn = _read_file(file)
            damaged += torn
            for measurement in measurements:
                key = (measurement.cell.key, measurement.machine.name)
                if key not in latest or latest[key].time <= measurement.time:
                    latest[key] = measurement
    return list(latest.values()), damaged


def record_files(path: Path) -> list[Path]:
    """The record files of a path: the file itself, that of a folder, or those of the studies in its subfolders.

    `trimtab profile` and `trimtab numerics` write records next to those of studies, which have no place in a report.

    Raises:
        DataError: there is none.

    Example:
        >>> record_files(Path("lab"))  # doctest: +SKIP
        [PosixPath('lab/attention/records.jsonl'), PosixPath('lab/step/records.jsonl')]
    """
    if not path.is_dir():
        return [path]
    if (path / RECORDS).exists():
        return [path / RECORDS]
    files = [file for file in sorted(path.glob(f"*/{RECORDS}")) if _is_of_study(file)]
    if not files:
        raise DataError(f"{path} has no {RECORDS}", f"give a folder with {RECORDS}, or such a file")
    return files


def _is_of_study(file: Path) -> bool:
    """Whether the first intact record of a file belongs to a study."""
    first = next(iter(read_records(file, "study")), None)
    return first in TITLES


def _read_file(file: Path) -> tuple[list[Measurement], int]:
    """(measurements, damaged lines) of one file."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}", f"give a folder with {RECORDS}") from None
    measurements, damaged = [], 0
    for line in filter(str.strip, lines):
        try:
            measurements.append(Measurement.from_dict(json.loads(line)))
        except (json.JSONDecodeError, RecursionError, DataError, TypeError):
            damaged += 1
    if not measurements:
        raise DataError(f"{file} has no measurements", "run a study first: trimtab bench sizes")
    return measurements, damaged


def recorded_cells(cells: Sequence[Cell], folder: Path, *, device: str) -> dict[str, Measurement]:
    """The measurements of cells that the next sweep would not repeat, by cell key.

    Example:
        >>> recorded_cells([Cell("sizes", {"size": "small"})], Path("missing"), device="cpu")
        {}
    """
    return _known(cells, folder / RECORDS, _machine(device, provenance(device, PACKAGES)))


def _machine(device: str, origin: Record) -> Machine:
    """The machine of a sweep. A CPU is identified by its threads as well: their number changes every time, and virtual
    machines of different sizes report the same name."""
    name = origin["device"]
    if not device.startswith("cuda"):
        threads = omp_threads()
        name = f"{name}, {threads} thread{'' if threads == 1 else 's'}"
    return Machine(name, origin["versions"])


def omp_threads() -> int:
    """Number of CPU threads of an operation: OMP_NUM_THREADS, or the cores that this process may use.

    Example:
        >>> omp_threads() >= 1
        True
    """
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) else host_cores()


def _known(cells: Sequence[Cell], path: Path, machine: Machine) -> dict[str, Measurement]:
    """Finished measurements of these cells on this machine with the same versions, by cell key."""
    if not path.exists():
        return {}
    try:
        measurements, _ = read_measurements([path])
    except DataError:
        return {}
    keys = {cell.key for cell in cells}
    tried = {
        measurement.cell.key: measurement
        for measurement in measurements
        if measurement.machine == machine and measurement.cell.key in keys
    }
    return {key: measurement for key, measurement in tried.items() if measurement.outcome not in UNFINISHED}
