"""Runs several cases at once up to their timed steps, which run one after another on an otherwise idle GPU. No torch.

Most of a case's time is spent on imports, weights, compilation and first steps. So in a round several processes plan
their cases, as many as fit in the GPU's memory together load their weights and run their first steps, and then each in
turn is timed while the others wait. What does not fit is loaded in a later round.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from benchmarks.plan_accuracy.cases import Case
from benchmarks.plan_accuracy.durations import start_seconds, timed_seconds

POLL_SECONDS = 0.05
GRACE_SECONDS = 15.0
"""Running cases are stopped this long after the end of the command's time; the next call repeats them."""
CONTEXT_BYTES = 2**30
"""GPU memory of a process before it allocates any tensor, rounded up."""
LOG_LINES, LINE_LENGTH = 30, 300
"""Lines that the record of a process that died keeps after the error in its log, and of the log's end; their length."""


class Moment(IntEnum):
    """How far a process is; it waits at `PLANNED`, `WARM` and `MEASURED`."""

    STARTED = 0
    PLANNED = 1
    LOADING = 2
    WARM = 3
    TIMED = 4
    MEASURED = 5
    ENDING = 6
    ENDED = 7


class OutOfTime(Exception):
    """The time of the command is over."""


class Worker:
    """The process of a case."""

    def __init__(self, case: Case, order: dict[str, Any]) -> None:
        self.case, self.moment, self.needs = case, Moment.STARTED, 0
        self.since = time.monotonic()
        self.record: dict[str, Any] | None = None
        self.folder = tempfile.TemporaryDirectory()
        self.results, self.log = (Path(self.folder.name) / name for name in ("results.jsonl", "log"))
        words = [sys.executable, "-m", "benchmarks.plan_accuracy.worker", str(self.results)]
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT
            )
        self._seen = 0
        self._send({"case": case.name, **order})

    def proceed(self) -> None:
        """Lets the waiting process continue."""
        self.moment, self.since = Moment(self.moment + 1), time.monotonic()
        self._send("continue")

    def poll(self, case_seconds: float) -> None:
        """Reads what the process has written; ends it if it has made no progress for `case_seconds`."""
        ended = self.process.poll() is not None  # before its file is read: all of it is there then
        text = self.results.read_text() if self.results.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()  # without an incomplete last line
        for line in lines[self._seen :]:
            self._seen += 1
            record = json.loads(line)
            if "reached" in record:
                self.moment, self.needs = Moment[record["reached"]], record.get("needs", self.needs)
            else:
                self.record = record
        stalled = time.monotonic() - self.since > case_seconds
        if stalled and not ended:
            self.process.kill()
        if ended or stalled:
            self.process.wait()
            self.moment = Moment.ENDED
            if self.record is None:
                log = self.log.read_text(errors="replace").strip().splitlines()
                how = ending(self.process.returncode, log) if ended else f"stopped after {case_seconds:.0f} s"
                self.record = {"case": self.case.name, "failed": how, "log": excerpt(log)}

    def close(self) -> None:
        """Ends the process and removes its files."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        self.folder.cleanup()

    def _send(self, order: Any) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process died, which `poll` reports
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.flush()


@dataclass
class Rounds:
    """Runs cases in rounds."""

    device: str
    work: Path
    finish: Callable[[dict[str, Any]], None]
    """Called with the record of each case that ended."""
    at_once: int = 1
    """Processes that exist at the same time."""
    case_seconds: float = 240.0
    """A process without progress for this long is stopped, and its case recorded as failed."""
    profile_above: float | None = None
    """Cases whose step time is off by more than this share are profiled too."""
    until: float = float("inf")
    """The end of the command's time, by `time.monotonic`."""
    workers: list[Worker] = field(default_factory=list)

    def run(self, cases: Sequence[Case]) -> bool:
        """Runs the cases, those with the shortest start first; returns whether Ctrl-C or the time stopped it."""
        waiting = sorted(cases, key=lambda case: start_seconds(case, self.work))
        try:
            while waiting or self.workers:
                self._start(waiting)
                if not self.workers:
                    return False  # no case fits in the remaining time
                self._wait(self.workers, Moment.PLANNED)
                chosen = self._fitting()
                for worker in chosen:
                    worker.proceed()
                self._wait(chosen, Moment.WARM)
                for worker in chosen:
                    if worker.moment is Moment.WARM:
                        self._time(worker)
                self.workers = [worker for worker in self.workers if worker.moment is not Moment.ENDED]
        except (KeyboardInterrupt, OutOfTime):
            return True
        finally:
            for worker in self.workers:
                worker.close()
        return False

    def _start(self, waiting: list[Case]) -> None:
        """Starts processes for cases that can be finished in the remaining time."""
        order = {"device": self.device, "work": str(self.work), "profile_above": self.profile_above}
        timed = sum(timed_seconds(worker.case) for worker in self.workers)
        for case in list(waiting):
            if len(self.workers) >= self.at_once:
                return
            more = timed_seconds(case)
            if time.monotonic() + start_seconds(case, self.work) + timed + more <= self.until:
                waiting.remove(case)
                self.workers.append(Worker(case, order))
                timed += more

    def _fitting(self) -> list[Worker]:
        """The first planned workers that fit in the GPU's memory together; one that does not fit runs alone."""
        budget, chosen = self._budget(), list[Worker]()
        for worker in self.workers:
            if worker.moment is Moment.PLANNED and (worker.needs <= budget or not chosen):
                chosen.append(worker)
                budget -= worker.needs
        return chosen

    def _budget(self) -> float:
        total = gpu_memory("total") if self.device == "cuda" else None
        return float("inf") if total is None else 0.95 * total - self.at_once * CONTEXT_BYTES

    def _time(self, worker: Worker) -> None:
        """Times a worker's steps and measures the memory that becomes free when its process ends."""
        worker.proceed()
        self._wait([worker], Moment.MEASURED, finish=False)
        used = gpu_memory("used") if self.device == "cuda" else None
        if worker.moment is Moment.MEASURED:
            worker.proceed()
        self._wait([worker], Moment.ENDED, finish=False)
        measured = (worker.record or {}).get("measured", {})
        reserved_last = measured.pop("reserved_last", None)
        if used is not None and reserved_last is not None:
            # At its end the allocator may hold less than at its peak; the rest of the process's memory is constant.
            own = used - stable_reading(lambda: gpu_memory("used") or 0)
            measured["process"] = own - reserved_last + measured["reserved"]
        self._finish(worker)

    def _wait(self, workers: Sequence[Worker], moment: Moment, *, finish: bool = True) -> None:
        """Waits until each of the workers has reached a moment or has ended."""
        while any(worker.moment < moment for worker in workers):
            if time.monotonic() > self.until + GRACE_SECONDS:
                raise OutOfTime
            time.sleep(POLL_SECONDS)
            for worker in workers:
                if worker.moment < moment:
                    worker.poll(self.case_seconds)
                    if worker.moment is Moment.ENDED and finish:
                        self._finish(worker)

    def _finish(self, worker: Worker) -> None:
        worker.close()
        assert worker.record is not None
        self.finish(worker.record)


def ending(returncode: int, log: Sequence[str]) -> str:
    """How a process ended that recorded no result: its exit code or signal, and the error in its log.

    Example:
        >>> ending(-6, ["loading", "terminate called", "  what():  uc >= 0", "frame #0: reset"])
        'the process ended with SIGABRT: what():  uc >= 0'
    """
    how = str(returncode) if returncode >= 0 else _signal_name(-returncode)
    return f"the process ended with {how}: {''.join(log[_error_line(log) :][:1]).strip()[:LINE_LENGTH]}"


def excerpt(log: Sequence[str]) -> list[str]:
    """The error in a log with the lines after it, and the last lines.

    Example:
        >>> excerpt(["loading", "  what():  uc >= 0", "frame #0: reset"])
        ['  what():  uc >= 0', 'frame #0: reset']
    """
    start, last = _error_line(log), max(len(log) - LOG_LINES, 0)
    kept = sorted({*range(start, min(start + LOG_LINES, len(log))), *range(max(last, start), len(log))})
    return [log[i][:LINE_LENGTH] for i in kept]


def _error_line(log: Sequence[str]) -> int:
    """The index of the line that explains an error: an abort in C++ is explained by a line "what():" before the C++
    stack, which faulthandler's stacks of all threads follow. The last line if there is none."""
    for word in ("what():", "error"):
        for i, line in enumerate(log):
            if word in line.lower():
                return i
    return max(len(log) - 1, 0)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def stable_reading(read: Callable[[], int], seconds: float = 5.0) -> int:
    """A reading once two consecutive ones are equal, or the last one after `seconds`.

    Example:
        >>> readings = iter([9, 5, 4, 4])
        >>> stable_reading(lambda: next(readings))
        4
    """
    until, last = time.monotonic() + seconds, read()
    while time.monotonic() < until:
        time.sleep(POLL_SECONDS)
        last, before = read(), last
        if last == before:
            break
    return last


def gpu_memory(which: str) -> int | None:
    """ "used" or "total" bytes of the GPU from nvidia-smi; None if it is not available."""
    words = ["nvidia-smi", f"--query-gpu=memory.{which}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    first = done.stdout.strip().splitlines()[:1]
    return int(first[0]) * 2**20 if first and first[0].strip().isdigit() else None
