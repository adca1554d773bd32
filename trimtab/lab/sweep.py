"""Runs the cells of studies in worker processes and records each measurement as soon as it is made.

On a GPU, what times nothing comes first, several processes at once: compiling for later cells, memory, losses
(`trimtab.lab.sharing`). Then timed cells are measured one after another, with the GPU to themselves.

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
from trimtab.lab.cell_times import COMPILED_ALONGSIDE, UNKNOWN_GPU, CellTimes, Speed
from trimtab.lab.records import Record, append_record, provenance, read_records, timestamp
from trimtab.lab.shared_phase import SharedPhase, SharedResult
from trimtab.lab.sharing import ordered, shared_work
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

PREPARED = "prepared.jsonl"
"""Compile times of preparations, next to the records."""
MOST_AHEAD = 7
"""Maximum number of processes that are started ahead for fresh cells."""

Progress = Callable[[int, int, Cell, Measurement | None], None]
"""(finished cells, total cells, the cell, its measurement or None when it begins)."""
Preparing = Callable[[int, int, Cell | None], None]
"""(finished preparations, total, the cell that the last one was for, None at the beginning)."""


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


@dataclass(frozen=True)
class Sharing:
    """How a sweep uses a GPU for work that times nothing.

    Example:
        >>> Sharing(at_once=4, budget=20 * 2**30).at_once
        4
    """

    at_once: int = 1
    """Number of processes; with 1 each cell compiles what it needs, and all are measured in their order."""
    budget: int = 0
    """Bytes of device memory for all of them together, by their estimates."""
    preparing: Preparing | None = None
    """Called at the beginning and after each preparation."""


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
    sharing: Sharing | None = None,
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
        sharing: processes for work that times nothing; none by default.

    Example:
        >>> run_sweep(cells, Path("lab"), device="cpu")[0].outcome                   # doctest: +SKIP
        <CellOutcome.MEASURED: 'measured'>
    """
    origin = provenance(device, PACKAGES, commit)
    machine = _machine(device, origin)
    known = {} if remeasure else _known(cells, folder / RECORDS, machine)
    sweep = _Sweep(
        cells, folder, device, progress or (lambda *words: None), cell_seconds, machine, origin["commit"],
        known, _Clock(limit, known.values()),
    )  # fmt: skip
    sharing = sharing or Sharing()
    if sharing.at_once > 1:
        sweep.share(sharing)
    return sweep.measure_alone()


@dataclass
class _Sweep:
    """A sweep that is under way."""

    cells: Sequence[Cell]
    folder: Path
    device: str
    progress: Progress
    cell_seconds: float
    machine: Machine
    commit: str
    known: dict[str, Measurement]
    """Measurements by cell key: those with a record, and those of this sweep."""
    clock: _Clock
    shared: set[str] = field(default_factory=set)
    """Keys of the cells that the first phase measured."""
    prepared: dict[str, dict[str, Any]] = field(default_factory=dict)
    """What preparations of this machine have found, by cell key: fields of the cell's result."""

    def share(self, sharing: Sharing) -> None:
        """The first phase: several processes at once."""
        self.prepared, current = _read_prepared(self.folder / PREPARED, self.machine, self.commit)
        works = [
            work
            for work in shared_work(cell for cell in self.cells if cell.key not in self.known)
            if not (work.prepares and work.cell.key in current)
        ]
        times = self.clock.times or CellTimes(Speed("cuda", UNKNOWN_GPU, 1e12))
        total, finished = sum(work.prepares for work in works), 0

        def done(result: SharedResult) -> None:
            nonlocal finished
            if not result.work.prepares:
                if result.stands:
                    self.shared.add(result.work.cell.key)
                    self.progress(len(self.known), len(self.cells), result.work.cell, None)
                    self._finish(result.work.cell, result.answer, result.seconds)
                return
            if result.answer["outcome"] == CellOutcome.TIMED_OUT.value and self.clock.remaining <= 0:
                return
            finished += 1
            self._note_prepared(result)
            if sharing.preparing is not None:
                sharing.preparing(finished, total, result.work.cell)

        if sharing.preparing is not None and total:
            sharing.preparing(0, total, None)
        SharedPhase(
            self.device, self.folder / LOG, sharing.at_once, sharing.budget, self.cell_seconds, self.clock.end,
            lambda work: self.clock.allows_seconds(
                times.preparing(work.cell) if work.prepares else times.seconds(work.cell)
            ),
            done,
        ).run(ordered(works, times))  # fmt: skip

    def _note_prepared(self, result: SharedResult) -> None:
        """Keeps the compile times of a preparation, unless a cache had the code and the cold times are known."""
        answer, key = result.answer, result.work.cell.key
        if answer["outcome"] != CellOutcome.MEASURED.value:
            return
        found = {**answer["result"], COMPILED_ALONGSIDE: result.alongside}
        if key in self.prepared and (found.get("from_cache") or found.get("compile_cached")):
            found = self.prepared[key]
        self.prepared[key] = found
        append_record(
            self.folder / PREPARED,
            {
                "cell": key,
                "machine": self.machine.name,
                "commit": self.commit,
                "boot": _boot(),
                "found": found,
            },
        )

    def measure_alone(self) -> list[Measurement]:
        """The second phase: one cell after another, in their order."""
        with WorkerProcess(self.device, self.folder / LOG) as worker:
            for number, cell in enumerate(self.cells):
                if cell.key in self.shared:
                    continue
                if cell.key in self.known:
                    self.progress(self._done(number), len(self.cells), cell, self.known[cell.key])
                elif self.clock.allows(cell, prepared=cell.key in self.prepared):
                    self.progress(self._done(number) - 1, len(self.cells), cell, None)
                    answer, seconds = self._answer(worker, number)
                    if answer["outcome"] == CellOutcome.TIMED_OUT.value and self.clock.remaining <= 0:
                        self.clock.stop(cell)
                        continue
                    self._finish(cell, answer, seconds, self._done(number))
        return [self.known[cell.key] for cell in self.cells if cell.key in self.known]

    def _done(self, number: int) -> int:
        """The number of finished cells once the one at an index is finished."""
        return 1 + number + sum(cell.key in self.shared for cell in self.cells[number + 1 :])

    def _answer(self, worker: WorkerProcess, number: int) -> tuple[dict[str, Any], float]:
        """(answer, seconds) of a cell, measured in a worker or, for a study that only counts, in this process."""
        cell = self.cells[number]
        study = find_study(cell.study)
        if study.in_process:
            start = time.perf_counter()
            answer = measure_cell(study.measure, dict(cell.settings))
            return answer, time.perf_counter() - start
        return worker.measure(
            study.measure, cell, self.cell_seconds, self.clock.end, ahead=self._fresh_after(number)
        )

    def _fresh_after(self, number: int) -> int:
        """The number of cells of the same study that follow a fresh cell and need a fresh process too."""
        count = 0
        if self.cells[number].fresh:
            for cell in self.cells[number + 1 :]:
                if cell.key in self.known:
                    continue
                if not cell.fresh or cell.study != self.cells[number].study or count == MOST_AHEAD:
                    break
                count += 1
        return count

    def _finish(self, cell: Cell, answer: dict[str, Any], seconds: float, done: int | None = None) -> None:
        """Records a measurement and tells the progress."""
        outcome, result = CellOutcome(answer["outcome"]), answer["result"]
        if outcome is CellOutcome.MEASURED and cell.key in self.prepared:
            result = {**result, **self.prepared[cell.key]}
        measurement = Measurement(
            cell, outcome, result, answer["message"], seconds, self.machine, self.commit, timestamp()
        )
        append_record(self.folder / RECORDS, measurement.to_dict())
        self.clock.add(measurement)
        self.known[cell.key] = measurement
        self.progress(done or len(self.known), len(self.cells), cell, measurement)


def _read_prepared(path: Path, machine: Machine, commit: str) -> tuple[dict[str, dict[str, Any]], set[str]]:
    """(what preparations of this commit on this machine have found, the cells whose code is still in the caches).

    A machine that starts anew may have lost its caches: its cells are prepared again, also where that is not known. So
    are those of other code, which has a cache of its own.
    """
    records, boot = read_records(path, "cell", "machine", "commit").values(), _boot()
    mine = [
        one
        for one in records
        if (one["machine"], one["commit"]) == (machine.name, commit) and {"boot", "found"} <= one.keys()
    ]
    return (
        {record["cell"]: record["found"] for record in mine},
        {record["cell"] for record in mine if boot and record["boot"] == boot},
    )


def _boot() -> str:
    """Identifies the machine's current start; empty where the system has no such name."""
    file = Path("/proc/sys/kernel/random/boot_id")
    return file.read_text(encoding="utf-8").strip() if file.exists() else ""


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

    @property
    def times(self) -> CellTimes | None:
        """The estimates; None without a limit."""
        return None if self._limit is None else self._limit.times

    def allows(self, cell: Cell, *, prepared: bool = False) -> bool:
        """Whether a cell may begin."""
        return self.times is None or self.allows_seconds(self.times.seconds(cell, prepared=prepared))

    def allows_seconds(self, seconds: float) -> bool:
        """Whether something that takes this long may begin."""
        if self.remaining <= 0 or (not self._is_first and seconds > self.remaining):
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
