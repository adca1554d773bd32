"""Runs the cells of studies in worker processes and records each measurement as soon as it is made.

A worker that runs out of memory, crashes or takes too long is replaced, and the sweep continues with the next cell. A
stopped sweep continues where it ended: cells that this machine has measured with the same versions are skipped.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from trimtab.facts.errors import DataError
from trimtab.facts.units import format_seconds
from trimtab.lab.records import append_record, provenance, timestamp
from trimtab.lab.studies import find_study
from trimtab.lab.study import Cell, Machine, Measurement, Outcome
from trimtab.lab.worker import READY, answer_without_result, measure_cell

RECORDS = "records.jsonl"
LOG = "worker.log"
"""The workers' output, tracebacks included."""
CELL_SECONDS = 600.0
"""Default time limit of a cell."""
START_SECONDS = 300.0
"""Time limit of a worker's start, which imports torch; not part of a cell's time."""
UNFINISHED = (Outcome.FAILED, Outcome.TIMED_OUT)
"""Outcomes that the next sweep measures again."""
PACKAGES = ("torch", "triton", "trimtab")

Progress = Callable[[int, int, Cell, Measurement | None], None]
"""(finished cells, total cells, the cell, its measurement or None when it begins)."""


def run_sweep(
    cells: Sequence[Cell],
    folder: Path,
    *,
    device: str,
    progress: Progress | None = None,
    remeasure: bool = False,
    cell_seconds: float = CELL_SECONDS,
    limit_seconds: float | None = None,
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
        limit_seconds: no cell begins after this time; recorded cells are returned all the same.
        commit: commit of the code, if git does not know it.

    Example:
        >>> run_sweep(cells, Path("lab"), device="cpu")[0].outcome                   # doctest: +SKIP
        <Outcome.MEASURED: 'measured'>
    """
    origin = provenance(device, PACKAGES, commit)
    machine = Machine(origin["device"], origin["versions"])
    known = {} if remeasure else _known(folder / RECORDS, machine)
    measurements: list[Measurement] = []
    begun = time.perf_counter()
    with _Worker(device, folder / LOG) as worker:
        for number, cell in enumerate(cells):
            measurement = known.get(cell.key)
            if measurement is None and _is_over(begun, limit_seconds):
                continue
            if measurement is None:
                if progress is not None:
                    progress(number, len(cells), cell, None)
                study = find_study(cell.study)
                if study.in_process:
                    start = time.perf_counter()
                    answer = measure_cell(study.measure, dict(cell.settings))
                    seconds = time.perf_counter() - start
                else:
                    answer, seconds = worker.measure(study.measure, cell, cell_seconds)
                measurement = Measurement(
                    cell,
                    Outcome(answer["outcome"]),
                    answer["result"],
                    answer["message"],
                    seconds,
                    machine,
                    origin["commit"],
                    timestamp(),
                )
                append_record(folder / RECORDS, measurement.to_dict())
            measurements.append(measurement)
            if progress is not None:
                progress(number + 1, len(cells), cell, measurement)
    return measurements


def _is_over(begun: float, limit_seconds: float | None) -> bool:
    return limit_seconds is not None and time.perf_counter() - begun > limit_seconds


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
    """The record files of a path: the file itself, that of a folder, or those of its subfolders.

    Raises:
        DataError: there is none.

    Example:
        >>> record_files(Path("lab"))  # doctest: +SKIP
        [PosixPath('lab/attention/records.jsonl'), PosixPath('lab/step/records.jsonl')]
    """
    if not path.is_dir():
        return [path]
    files = [path / RECORDS] if (path / RECORDS).exists() else sorted(path.glob(f"*/{RECORDS}"))
    if not files:
        raise DataError(f"{path} has no {RECORDS}", f"give a folder with {RECORDS}, or such a file")
    return files


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


def _known(path: Path, machine: Machine) -> dict[str, Measurement]:
    """Finished measurements of this machine with the same versions, by cell key."""
    if not path.exists():
        return {}
    try:
        measurements, _ = read_measurements([path])
    except DataError:
        return {}
    tried = {
        measurement.cell.key: measurement for measurement in measurements if measurement.machine == machine
    }
    return {key: measurement for key, measurement in tried.items() if measurement.outcome not in UNFINISHED}


class _Worker:
    """A process that measures cells; it is replaced after a crash, a failure or running out of memory."""

    def __init__(self, device: str, log: Path) -> None:
        self.device, self.log = device, log
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str] = queue.Queue()

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def measure(self, function: str, cell: Cell, seconds: float) -> tuple[dict[str, Any], float]:
        """(the worker's answer, seconds that it took); a crash and a timeout are answers as well.

        Args:
            function: "module:function".
            cell: the settings.
            seconds: the timeout.
        """
        if cell.fresh:
            self.stop()
        start = time.perf_counter()
        line: str | None = READY
        if self._process is None:
            self._process = self._start()
            line = self._line(START_SECONDS)
        process = self._process
        if line == READY:
            start = time.perf_counter()
            line = self._ask({"measure": function, "settings": dict(cell.settings)}, seconds)
        took = time.perf_counter() - start
        if line is None:
            self.stop()
            return answer_without_result(Outcome.TIMED_OUT, f"took longer than {format_seconds(took)}"), took
        if not line:
            return self._crashed(process), took
        answer: dict[str, Any] = json.loads(line)
        if answer["outcome"] in (Outcome.OUT_OF_MEMORY.value, Outcome.FAILED.value):
            self.stop()
        return answer, took

    def _ask(self, request: dict[str, Any], seconds: float) -> str | None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return ""
        return self._line(seconds)

    def _line(self, seconds: float) -> str | None:
        """The worker's next line; empty if it has ended, None after a timeout."""
        try:
            return self._lines.get(timeout=seconds)
        except queue.Empty:
            return None

    def _start(self) -> subprocess.Popen[str]:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            # In a new session: Ctrl-C reaches only this process, which then ends the worker and its children.
            process = subprocess.Popen(
                [sys.executable, "-m", "trimtab.lab.worker", self.device],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
                start_new_session=True,
            )
        lines: queue.Queue[str] = queue.Queue()

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                lines.put(line)
            lines.put("")

        threading.Thread(target=read, daemon=True).start()
        self._lines = lines
        return process

    def _crashed(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        code = process.wait()
        self.stop()
        if code in (-9, 128 + 9):  # SIGKILL, as the kernel's OOM killer sends it
            return answer_without_result(
                Outcome.OUT_OF_MEMORY, "the process was killed, as the kernel does when memory is full"
            )
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return answer_without_result(Outcome.FAILED, f"the process {how}; see {self.log}")

    def stop(self) -> None:
        """Kills the process and its children."""
        process, self._process = self._process, None
        if process is None:
            return
        if sys.platform == "win32":
            process.kill()
        else:
            with contextlib.suppress(ProcessLookupError):  # all of them have ended
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
