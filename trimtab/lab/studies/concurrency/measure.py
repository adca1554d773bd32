"""Times one way: starts its processes, and lets them generate when all are ready."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from trimtab.lab.studies.concurrency.cells import ConcurrencySettings, prompts
from trimtab.lab.studies.concurrency.generated import Generated
from trimtab.lab.studies.concurrency.ways import Way
from trimtab.lab.timing import time_once

PROGRAM = "trimtab.lab.studies.concurrency.process"


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Measures one cell: generates for all prompts once."""
    return asdict(
        generate(ConcurrencySettings(**settings), prompts(Path(f) if (f := settings["file"]) else None))
    )


def generate(job: ConcurrencySettings, texts: list[str]) -> Generated:
    """Starts the processes, waits until they are ready, and times the generation."""
    way = Way(job.way)
    count = way.processes(min(job.workers, len(texts)))
    threads = way.torch_threads(job.cores, job.workers)
    shares = [texts[number::count] for number in range(count)]
    free_before = _free_device_bytes(job.device)
    with ExitStack() as stack:
        start = time.perf_counter()
        running = [stack.enter_context(_Process(job, threads, share)) for share in shares]
        for process in running:
            process.read()
        start_seconds = time.perf_counter() - start
        answers: list[dict[str, Any]] = []

        def generate_in_all() -> None:
            for process in running:
                process.write("")
            answers.extend(process.read() for process in running)

        seconds = time_once(generate_in_all, "cpu")  # processes answer only after their device has finished
        free_after = _free_device_bytes(job.device)
    digests = [""] * len(texts)
    for number, answer in enumerate(answers):
        digests[number::count] = answer["digests"]
    return Generated(
        seconds=seconds,
        start_seconds=start_seconds,
        tokens=sum(answer["tokens"] for answer in answers),
        processes=count,
        torch_threads=threads,
        host_bytes=sum(answer["bytes"] for answer in answers),
        device_bytes=None if free_before is None or free_after is None else free_before - free_after,
        digests=digests,
    )


def _free_device_bytes(device: str) -> int | None:
    """Free memory of a GPU according to its driver, which counts contexts and other processes; None on a CPU."""
    if not device.startswith("cuda"):
        return None
    import torch

    return int(torch.cuda.mem_get_info(torch.device(device))[0])


class _Process:
    """A process with a model and its share of the prompts; killed at the end of the `with` block."""

    def __init__(self, job: ConcurrencySettings, threads: int, share: list[str]) -> None:
        self.order = {
            "way": job.way,
            "workers": job.workers,
            "threads": threads,
            "model": job.model,
            "device": job.device,
            "max_new_tokens": job.max_new_tokens,
            "prompts": share,
        }

    def __enter__(self) -> _Process:
        self.errors: IO[str] = tempfile.TemporaryFile("w+", encoding="utf-8")
        self.process = subprocess.Popen(
            [sys.executable, "-m", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            encoding="utf-8",
        )
        self.write(json.dumps(self.order))
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.communicate()
        self.errors.close()

    def write(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def read(self) -> dict[str, Any]:
        """The next answer; raises an error if the process has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        code = self.process.wait()
        self.errors.seek(0)
        errors = self.errors.read().strip().splitlines()
        if code in (-9, 137):
            raise MemoryError("a process was killed, as the kernel does when memory is full")
        raise RuntimeError(errors[-1] if errors else f"a process ended with {code}")
