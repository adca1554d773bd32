"""A pool of tokenizer processes: one process per core, and one thread of this process per worker to move bytes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import IO

from trimtab.data import tokenizer_worker as worker
from trimtab.data.readers import Segment
from trimtab.data.rendering import Renderer, Rendering
from trimtab.data.tokenizer_worker import Tokens
from trimtab.facts.errors import ResourceError

MAX_WORKERS = 64


def default_num_proc() -> int:
    """The cores this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MAX_WORKERS)


class _Worker:
    """One child process and its pipes; for examples, also a process for the chat template."""

    def __init__(self, jsons: tuple[str, str], rendering: Rendering | None) -> None:
        self.stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed with the worker
        # The child finds the packages where this process does, and must not start threads of its own.
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(Path(worker.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the parent, which then closes the pipe
        )
        self.jsons = jsons
        self.renderer = Renderer(rendering)
        self.initialized = False

    def __call__(self, batch: list[Segment]) -> Tokens:
        texts = self.renderer.texts(batch)
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            if not self.initialized:
                worker.write_texts(
                    self.process.stdin, [worker.TextChunk(json.encode()) for json in self.jsons]
                )
                self.initialized = True
            worker.write_texts(self.process.stdin, texts)
            return worker.read_tokens(self.process.stdout)
        except (EOFError, BrokenPipeError, ValueError) as error:
            raise self._died() from error

    def _died(self) -> ResourceError:
        code = self.process.wait()
        self.stderr.seek(0)
        lines = self.stderr.read().decode("utf-8", "replace").strip().splitlines()
        why = lines[-1] if lines else f"signal {-code}" if code < 0 else f"exit code {code}"
        return ResourceError(
            f"a tokenizer process exited early ({why})", "free some memory or lower num_proc, then try again"
        )

    def close_pipes(self) -> None:
        self.renderer.close()
        for stream in (self.process.stdin, self.process.stdout, self.stderr):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):  # unsent bytes for a process that has exited
                stream.close()


class WorkerPool:
    """A pool of tokenizer processes; `submit` returns a future of a batch's tokens.

    Args:
        jsons: the tokenizer for texts that begin a document, and the one for texts that continue one, as JSON.
        size: the number of processes.
        rendering: how examples are rendered; None for plain text.
    """

    def __init__(self, jsons: tuple[str, str], size: int, rendering: Rendering | None = None) -> None:
        self.size = size
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        self._workers = [_Worker(jsons, rendering) for _ in range(size)]
        for child in self._workers:
            self._idle.put(child)
        self._threads = ThreadPoolExecutor(size, thread_name_prefix="tokenizing")
        self._finalizer = weakref.finalize(self, _close_all, self._workers)

    def submit(self, batch: list[Segment]) -> Future[Tokens]:
        """Sends segments to the next idle process."""
        return self._threads.submit(self._encode, batch)

    def _encode(self, batch: list[Segment]) -> Tokens:
        child = self._idle.get()
        try:
            return child(batch)
        finally:
            self._idle.put(child)

    def close(self) -> None:
        """Ends the processes and drops batches in flight."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._finalizer()
        self._threads.shutdown(wait=True)
        for child in self._workers:
            child.close_pipes()


def _close_all(workers: list[_Worker]) -> None:
    # Kill processes before closing pipes: a thread that waits on a pipe then reads its end and wakes up.
    for child in workers:
        child.process.kill()
        child.renderer.kill()
    for child in workers:
        child.process.wait()
