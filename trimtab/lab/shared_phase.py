"""The first phase of a sweep on a GPU: compiles and measures what needs no GPU of its own, several processes at once.

`trimtab.lab.sharing` says what that is. Here a thread for each process takes the next work whose memory fits alongside
what runs, and the results are handed over one after another.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trimtab.facts.devices import host_cores
from trimtab.lab.sharing import SharedWork
from trimtab.lab.studies import find_study
from trimtab.lab.study import CellOutcome
from trimtab.lab.worker_process import WorkerProcess

COMPILE_THREADS = 4
"""Processes of torch's compiler for each worker; its default is one for each core, in every worker."""
PREPARE = "prepare"
"""The function that compiles what a cell needs, in the module of the study's `measure`."""


@dataclass(frozen=True)
class SharedResult:
    """The end of one piece of work."""

    work: SharedWork
    answer: dict[str, Any]
    """The worker's answer."""
    seconds: float
    alongside: int
    """The largest number of other processes that worked at the same time."""

    @property
    def stands(self) -> bool:
        """Whether the answer is final. Whatever went wrong may be due to the other processes: the cell is measured
        again alone."""
        final = (CellOutcome.MEASURED, CellOutcome.NOT_SUPPORTED, CellOutcome.PREDICTED_OUT_OF_MEMORY)
        return CellOutcome(self.answer["outcome"]) in final


@dataclass
class _Running:
    work: SharedWork
    alongside: int = 0


@dataclass
class SharedPhase:
    """Runs work in several processes.

    Args:
        device: cpu, cuda or cuda:N.
        log: the file of the workers' output.
        at_once: the number of processes.
        budget: bytes of device memory for all of them together; work that needs more runs alone.
        seconds: time limit of one piece of work.
        end: when everything stops, by `time.perf_counter`.
        allows: whether a piece of work may still begin.
        done: receives each result, in the thread that calls `run`'s workers one at a time.
    """

    device: str
    log: Path
    at_once: int
    budget: int
    seconds: float
    end: float
    allows: Callable[[SharedWork], bool]
    done: Callable[[SharedResult], None]
    _running: dict[int, _Running] = field(default_factory=dict)
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _errors: list[BaseException] = field(default_factory=list)
    _stopped: bool = False

    def run(self, works: Sequence[SharedWork]) -> None:
        """Runs all work that is allowed to begin, in this order as far as memory allows."""
        waiting = list(works)
        count = min(self.at_once, len(waiting))
        workers = [
            WorkerProcess(self.device, self.log, environment=self._environment(count), shares=self._on_gpu)
            for _ in range(count)
        ]
        threads = [
            threading.Thread(target=self._work, args=(worker, waiting), daemon=True) for worker in workers
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                while thread.is_alive():  # a join without a timeout would not notice Ctrl-C
                    thread.join(0.2)
        finally:
            with self._changed:
                self._stopped = True
                self._changed.notify_all()
            for worker in workers:
                worker.close()
            for thread in threads:
                thread.join()
        if self._errors:
            raise self._errors[0]

    @property
    def _on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    def _environment(self, count: int) -> dict[str, str]:
        """Shares the cores among the processes."""
        share = max(1, host_cores() // count)
        return {
            "OMP_NUM_THREADS": str(share),
            "TORCHINDUCTOR_COMPILE_THREADS": str(min(COMPILE_THREADS, share + 1)),
        }

    def _work(self, worker: WorkerProcess, waiting: list[SharedWork]) -> None:
        """One thread: takes work until none is left."""
        try:
            while (work := self._next(waiting)) is not None:
                answer, took = self._answer(worker, work)
                self._end(work, answer, took)
        except BaseException as error:  # noqa: BLE001 - raised again by `run`
            with self._changed:
                self._errors.append(error)
                self._stopped = True
                self._changed.notify_all()

    def _answer(self, worker: WorkerProcess, work: SharedWork) -> tuple[dict[str, Any], float]:
        measure = find_study(work.cell.study).measure
        function = f"{measure.partition(':')[0]}:{PREPARE}" if work.prepares else measure
        return worker.measure(function, work.cell, self.seconds, self.end)

    def _next(self, waiting: list[SharedWork]) -> SharedWork | None:
        """Waits for work that fits alongside what runs; None if nothing is left to begin."""
        with self._changed:
            while True:
                waiting[:] = [work for work in waiting if self.allows(work)]
                if self._stopped or not waiting:
                    return None
                used = sum(one.work.nbytes for one in self._running.values())
                fitting = (w for w in waiting if not self._running or used + w.nbytes <= self.budget)
                chosen = next(fitting, None)
                if chosen is not None:
                    waiting.remove(chosen)
                    self._running[id(chosen)] = _Running(chosen)
                    for one in self._running.values():
                        one.alongside = max(one.alongside, len(self._running) - 1)
                    return chosen
                self._changed.wait(1.0 if math.isfinite(self.end) else None)

    def _end(self, work: SharedWork, answer: dict[str, Any], took: float) -> None:
        with self._changed:
            running = self._running.pop(id(work))
            self._changed.notify_all()
            if not self._stopped:
                self.done(SharedResult(work, answer, took, running.alongside))
