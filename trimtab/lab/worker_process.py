"""A worker process, as the sweep sees it: it is started, asked to measure cells, and replaced when it fails."""

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trimtab.facts.units import format_seconds
from trimtab.lab.study import Cell, CellOutcome
from trimtab.lab.worker import READY, answer_without_result

QUIET = {"TORCH_WARM_POOL": "0"}
"""Environment of a process that measures several cells: torch's compiler starts its processes when it compiles, and not
whenever it is imported, as they would start while a cell is timed whose code is in the cache."""
START_SECONDS = 300.0
"""Time limit of a worker's start, which imports torch; not part of a cell's time."""


def oom_kills(file: Path = Path("/proc/vmstat")) -> int | None:
    """Number of processes that Linux has killed since it started because memory was full; None if it is unknown.

    A worker that a user kills with SIGKILL ends with the same code, but does not count.

    Example:
        >>> oom_kills(Path("missing")) is None
        True
    """
    if not file.exists():
        return None
    for line in file.read_text(encoding="utf-8").splitlines():
        name, _, count = line.partition(" ")
        if name == "oom_kill":
            return int(count)
    return None


class _Started:
    """A worker that has been started, with the lines that it writes."""

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            # In a new session: Ctrl-C reaches only this process, which then ends the worker and its children.
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                encoding="utf-8",
                start_new_session=True,
                env={**os.environ, **environment},
            )
        self.first: str | None = None
        """Its first line, `READY`; None until `wait` has read it, or after a timeout."""
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def line(self, seconds: float) -> str | None:
        """The next line; empty if the process has ended, None after a timeout."""
        try:
            return self._lines.get(timeout=max(seconds, 0.0))
        except queue.Empty:
            return None

    def wait(self, end: float) -> None:
        """Waits until the worker is ready, at most until `end` by `time.perf_counter`."""
        self.first = self.line(end - time.perf_counter())

    def ask(self, request: Mapping[str, Any], seconds: float) -> str | None:
        """The answer to a request, as `line`."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return ""
        return self.line(seconds)

    def kill(self) -> None:
        """Kills the process and its children."""
        if sys.platform == "win32":
            self.process.kill()
        else:
            with contextlib.suppress(ProcessLookupError):  # all of them have ended
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class WorkerProcess:
    """A process that measures cells; it is replaced after a crash, a failure or running out of memory.

    Args:
        device: cpu, cuda or cuda:N.
        log: the file of the workers' output.
        environment: variables to set in it.
        shares: whether other processes use the GPU at the same time: it then frees a cell's cached memory at its end.
    """

    def __init__(
        self, device: str, log: Path, *, environment: Mapping[str, str] | None = None, shares: bool = False
    ) -> None:
        self.device, self.log = device, log
        self.environment, self.shares = environment or {}, shares
        self._current: _Started | None = None
        self._spares: list[_Started] = []
        """Started ahead, for the next fresh cells of the same study."""
        self._spare_module = ""
        self._closed = False

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills all its processes, also from another thread; it then starts no more."""
        self._closed = True
        self.stop()
        self._drop_spares()

    def measure(
        self, function: str, cell: Cell, seconds: float, end: float, *, ahead: int = 0
    ) -> tuple[dict[str, Any], float]:
        """(the worker's answer, seconds that it took); a crash and a timeout are answers as well.

        Args:
            function: "module:function".
            cell: the settings.
            seconds: the timeout.
            end: the time, by `time.perf_counter`, at which the cell times out in any case.
            ahead: the number of fresh cells of this study that follow. If a process has to be started, theirs are
                started with it: they import torch at the same time, and nothing starts while a cell is timed.
        """
        if cell.fresh:
            self.stop()
        start = time.perf_counter()
        kills = oom_kills()
        if self._current is None:
            environment = {**({} if cell.fresh else QUIET), **self.environment}
            module = function.partition(":")[0]
            self._current = self._next(module, environment, ahead, min(start + START_SECONDS, end))
        worker = self._current
        if self._closed:  # perhaps before the assignment above, where `close` does not find it
            worker.kill()
            return answer_without_result(CellOutcome.FAILED, "the sweep was stopped"), 0.0
        line = worker.first
        if line == READY:
            start = time.perf_counter()
            request = {"measure": function, "settings": dict(cell.settings), "release": self.shares}
            line = worker.ask(request, min(seconds, end - start))
        took = time.perf_counter() - start
        if line is None:
            self.stop()
            return answer_without_result(
                CellOutcome.TIMED_OUT, f"took longer than {format_seconds(took)}"
            ), took
        if not line:
            return self._crashed(worker.process, kills), took
        answer: dict[str, Any] = json.loads(line)
        if answer["outcome"] in (CellOutcome.OUT_OF_MEMORY.value, CellOutcome.FAILED.value):
            self.stop()
        return answer, took

    def _next(self, module: str, environment: Mapping[str, str], ahead: int, end: float) -> _Started:
        """A worker that has imported a study's module."""
        if module != self._spare_module:
            self._drop_spares()
            self._spares = []
        if not self._spares:
            command = [sys.executable, "-m", "trimtab.lab.worker", self.device, module]
            self._spares = [_Started(command, self.log, environment) for _ in range(1 + ahead)]
            self._spare_module = module
            if self._closed:
                self._drop_spares()
            for started in self._spares:
                started.wait(end)
        return self._spares.pop(0)

    def _drop_spares(self) -> None:
        for started in self._spares:
            started.kill()

    def _crashed(self, process: subprocess.Popen[str], kills: int | None) -> dict[str, Any]:
        """The answer for a process that has ended.

        Args:
            process: the process.
            kills: processes that the kernel had killed for lack of memory before the cell; None if it does not count.
        """
        code = process.wait()
        self.stop()
        if code in (-9, 128 + 9) and (kills is None or oom_kills() != kills):
            return answer_without_result(
                CellOutcome.OUT_OF_MEMORY, "the process was killed, as the kernel does when memory is full"
            )
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return answer_without_result(CellOutcome.FAILED, f"the process {how}; see {self.log}")

    def stop(self) -> None:
        """Kills the process and its children."""
        worker, self._current = self._current, None
        if worker is not None:
            worker.kill()
