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
from pathlib import Path
from typing import Any

from trimtab.facts.units import format_seconds
from trimtab.lab.study import Cell, CellOutcome
from trimtab.lab.worker import READY, answer_without_result

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


class WorkerProcess:
    """A process that measures cells; it is replaced after a crash, a failure or running out of memory."""

    def __init__(self, device: str, log: Path) -> None:
        self.device, self.log = device, log
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str] = queue.Queue()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def measure(self, function: str, cell: Cell, seconds: float, end: float) -> tuple[dict[str, Any], float]:
        """(the worker's answer, seconds that it took); a crash and a timeout are answers as well.

        Args:
            function: "module:function".
            cell: the settings.
            seconds: the timeout.
            end: the time, by `time.perf_counter`, at which the cell times out in any case.
        """
        if cell.fresh:
            self.stop()
        start = time.perf_counter()
        kills = oom_kills()
        line: str | None = READY
        if self._process is None:
            self._process = self._start()
            line = self._line(min(START_SECONDS, end - start))
        process = self._process
        if line == READY:
            start = time.perf_counter()
            timeout = min(seconds, end - start)
            line = self._ask({"measure": function, "settings": dict(cell.settings)}, timeout)
        took = time.perf_counter() - start
        if line is None:
            self.stop()
            return answer_without_result(
                CellOutcome.TIMED_OUT, f"took longer than {format_seconds(took)}"
            ), took
        if not line:
            return self._crashed(process, kills), took
        answer: dict[str, Any] = json.loads(line)
        if answer["outcome"] in (CellOutcome.OUT_OF_MEMORY.value, CellOutcome.FAILED.value):
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
            return self._lines.get(timeout=max(seconds, 0.0))
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
