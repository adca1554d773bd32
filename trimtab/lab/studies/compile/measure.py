"""Compiles one model with an empty cache, runs it over several lengths, and again in a second process."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch._inductor.utils import fresh_cache

from trimtab.lab.compilation import record_compilations
from trimtab.lab.compile_data import CompileLog
from trimtab.lab.step_timing import time_steps
from trimtab.lab.studies.compile.results import CompileResult, Length
from trimtab.lab.studies.compile.settings import Backend, Scope, Shapes
from trimtab.lab.studies.compile.subject import Subject, build_subject
from trimtab.lab.study import CellOutcome
from trimtab.lab.timing import time_once

WARM = "trimtab.lab.studies.compile.measure:measure_warm"
TIMED_SECONDS = 20.0
"""Time limit of the steps in each mode, eager and compiled."""


@dataclass(frozen=True)
class _Step:
    """Loss and global gradient norm of one run."""

    loss: float
    norm: float


def measure(settings: dict[str, Any]) -> dict[str, Any]:
    """Measures one cell: its compilations, cold and warm, and the speed-up."""
    subject = build_subject(settings)
    lengths: list[int] = settings["lengths"]
    eager = [_run(subject, tokens) for tokens in lengths]
    with fresh_cache():
        with record_compilations() as recorded:
            _compile(subject, settings)
            compared = [
                _compared(subject, tokens, expected, settings["device"])
                for tokens, expected in zip(lengths, eager, strict=True)
            ]
        cold = recorded()
        times = _times(subject, settings)
        warm = None
        if Backend(settings["backend"]) is Backend.INDUCTOR:
            del subject  # the second process needs the memory
            _free(settings["device"])
            warm = _warm(settings)
    return CompileResult(cold, tuple(compared), lengths[0], *times, warm).to_dict()


def measure_warm(settings: dict[str, Any]) -> dict[str, Any]:
    """Runs the same compilations in this process, with the cache of another process."""
    subject = build_subject(settings)
    with record_compilations() as recorded:
        _compile(subject, settings)
        for tokens in settings["lengths"]:
            subject.run(tokens)
    return recorded().to_dict()


def _compile(subject: Subject, settings: dict[str, Any]) -> None:
    subject.compile(Scope(settings["scope"]), Shapes(settings["shapes"]), Backend(settings["backend"]))


def _run(subject: Subject, tokens: int) -> _Step:
    loss = float(subject.run(tokens))
    return _Step(loss, subject.gradient_norm())


def _compared(subject: Subject, tokens: int, expected: _Step, device: str) -> Length:
    """Runs the first step of a sequence length, compilation included, and compares it with eager mode."""
    steps: list[_Step] = []
    seconds = time_once(lambda: steps.append(_run(subject, tokens)), device)
    return Length(
        tokens,
        abs(steps[0].loss - expected.loss) / abs(expected.loss),
        abs(steps[0].norm - expected.norm) / expected.norm,
        seconds,
    )


def _times(subject: Subject, settings: dict[str, Any]) -> tuple[float, float]:
    """Milliseconds of a step at the first length: (eager, compiled)."""
    tokens = settings["lengths"][0]

    def median_ms() -> float:
        return time_steps(
            lambda: lambda: subject.run(tokens),
            device=settings["device"],
            steps=settings["steps"],
            warm_up=1,
            budget_s=TIMED_SECONDS,
        ).host.median_ms

    compiled = median_ms()
    with subject.eager():
        return median_ms(), compiled


def _free(device: str) -> None:
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def _warm(settings: dict[str, Any]) -> CompileLog | None:
    """The compilations of a second process, like a second run of the same recipe; it inherits the cache folder."""
    order = json.dumps({"measure": WARM, "settings": settings})
    device = settings["device"]
    if device == "cuda":  # the same GPU, where there are several
        device = f"cuda:{torch.cuda.current_device()}"
    words = [sys.executable, "-m", "trimtab.lab.worker", device]
    done = subprocess.run(words, input=order + "\n", stdout=subprocess.PIPE, text=True, check=True)
    answer = json.loads(done.stdout.splitlines()[-1])
    if answer["outcome"] != CellOutcome.MEASURED.value:
        raise RuntimeError(f"with a warm cache: {answer['message']}")
    return CompileLog.from_dict(answer["result"])
