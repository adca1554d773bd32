"""A process of the benchmark: trains one case and writes what it measured as a JSON line.

python -m benchmarks.plan_accuracy.worker RESULTS.jsonl < ORDERS

It waits for a line on its standard input before it loads weights, before the timed steps, and before it ends: `rounds`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import re
import resource
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.console import Console
from torch.profiler import ProfilerActivity, profile

from benchmarks.plan_accuracy.cases import Case
from benchmarks.plan_accuracy.durations import steps_of
from benchmarks.plan_accuracy.inputs import recipe_of
from benchmarks.plan_accuracy.readings import predicted, step_times
from benchmarks.plan_accuracy.rounds import Moment
from trimtab import launch
from trimtab.facts.errors import TrimtabError
from trimtab.lab.contests import first_line
from trimtab.lab.profile_data import LONGEST_NAME, Profile
from trimtab.lab.profiles import summarize
from trimtab.lab.records import append_record
from trimtab.lab.timing import synchronize
from trimtab.recipe import Recipe, build
from trimtab.report import LiveView
from trimtab.run.prepare import prepare

PROFILED = 40
"""Kernels of a profile that are recorded."""


class Enough(BaseException):
    """Raised after the last measured step. Not an Exception: before one propagates, the training loop saves a
    checkpoint, which can take longer than the steps."""


class Abandoned(BaseException):
    """The measuring command has ended."""


class Pauses:
    """Reports moments, and waits at each until the measuring command lets the process continue."""

    def __init__(self, results: Path, orders: TextIO) -> None:
        self.results, self.orders = results, orders

    def wait(self, moment: Moment, **facts: Any) -> float:
        """Returns the seconds waited."""
        append_record(self.results, {"reached": moment.name, **facts})
        began = time.perf_counter()
        if not self.orders.readline():
            raise Abandoned
        return time.perf_counter() - began


class PausingView(LiveView):
    """Shows nothing, and waits when the plan is made, before any weights are loaded."""

    def __init__(self, wait: Callable[..., float]) -> None:
        super().__init__(console=Console(quiet=True))
        self.wait = wait
        self.messages: list[str] = []
        """What the run said, such as that a CUDA graph could not be captured, which makes steps slower."""

    def message(self, text: str) -> None:
        """Keeps the message."""
        self.messages.append(text)

    def plan(self, plan: dict[str, Any]) -> None:
        """Reports the memory that the run needs."""
        self.wait(Moment.PLANNED, needs=plan["memory"]["needed"])


class ProfiledStep:
    """Profiles the step after the measured ones."""

    def __init__(self, device: str) -> None:
        self.device = device
        cuda = device.startswith("cuda")
        self.profiler = profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU])
        synchronize(device)
        self.profiler.start()
        self.began = time.perf_counter()

    def end(self) -> Profile:
        """The profile of what ran since the start."""
        synchronize(self.device)
        seconds = time.perf_counter() - self.began
        self.profiler.stop()
        return summarize(
            self.profiler.events() or (), cuda=self.device.startswith("cuda"), host_seconds=seconds
        )


def run(
    case: Case,
    root: Path,
    device: str,
    wait: Callable[..., float] = lambda moment, **facts: 0.0,
    profile_above: float | None = None,
) -> dict[str, Any]:
    """Train a case; returns predictions, measurements and choices.

    Args:
        case: the case.
        root: the folder of models, data and runs.
        device: cpu or cuda.
        wait: called at each moment; returns the seconds waited.
        profile_above: one more step is profiled if the predicted step time is off by more than this share.
    """
    folder = root / "runs" / re.sub(r"[^a-z0-9.]+", "-", case.name)
    shutil.rmtree(folder, ignore_errors=True)
    recipe = build(recipe_of(case, root, folder, device))
    clean_up(device)  # large weights were initialized on the device
    steps = steps_of(case)
    measured: dict[str, Any] = {}
    waited = 0.0
    profiled: ProfiledStep | None = None

    def after_step(step: int) -> None:
        nonlocal waited, profiled
        if step == steps.together * steps.warm_up:
            waited = wait(Moment.WARM)
        if profiled is not None:
            measured["profile"] = profile_record(profiled.end())
            raise Enough
        if step >= steps.total:
            measured.update(memory_of(device))
            measured.update(step_times(metrics(folder), steps.together, steps.warm_up, waited))
            wait(Moment.MEASURED)
            seconds = predicted(read_json(folder / "plan.json"))["step_seconds"]
            if not is_off(seconds, measured["step_seconds"], profile_above):
                raise Enough
            profiled = ProfiledStep(device)

    with PausingView(wait) as view:
        started = time.perf_counter()
        with contextlib.suppress(Enough):
            launch.train(recipe, view, after_step=after_step)
        seconds = time.perf_counter() - started
    rows = metrics(folder)
    peak = next(row for row in rows if row["kind"] == "memory" and row["when"] == "peak")
    buckets = ("weights", "gradients", "optimizer", "activations", "other")
    measured |= {
        "allocated": sum(peak[bucket] for bucket in buckets),
        "buckets": {bucket: peak[bucket] for bucket in buckets},
    }
    plan, choices = read_json(folder / "plan.json"), read_json(folder / "choices.json")
    prediction = predicted(plan)
    if prediction["reserved"] is None and device.startswith("cuda"):
        prediction |= predict_reserved(recipe)
    shutil.rmtree(folder, ignore_errors=True)
    kept = ("dtype", "weights_dtype", "gradient_dtype", "graphs", "compile", "memory", "loss", "optimizer")
    chosen = {key: choices[key] for key in kept if key in choices}
    found = {"predicted": prediction, "measured": measured, "chosen": chosen, "run_s": round(seconds, 2)}
    return {**found, "messages": view.messages} if view.messages else found


def is_off(predicted_seconds: float | None, seconds: float | None, share: float | None) -> bool:
    """Whether a predicted time is known, and its error exceeds `share`.

    Example:
        >>> is_off(1.05, 1.0, 0.03), is_off(1.05, 1.0, None), is_off(None, 1.0, 0.03)
        (True, False, False)
    """
    if share is None or not predicted_seconds or not seconds:
        return False
    return abs(predicted_seconds / seconds - 1) > share


def profile_record(found: Profile) -> dict[str, Any]:
    """A profile for the record: milliseconds in all, and of the longest kernels."""
    kernels = [
        {"name": entry.name[:LONGEST_NAME], "kind": entry.kind.value, "count": entry.count}
        | {"ms": round(1e3 * entry.seconds, 4)}
        for entry in found.entries[:PROFILED]
    ]
    totals = {"busy": found.busy_seconds, "span": found.span_seconds, "host": found.host_seconds}
    return {f"{name}_ms": round(1e3 * value, 3) for name, value in totals.items()} | {
        "launches": found.calls,
        "kernels": kernels,
    }


def metrics(folder: Path) -> list[dict[str, Any]]:
    """All records of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def read_json(path: Path) -> dict[str, Any]:
    """An object from a file."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def memory_of(device: str) -> dict[str, int]:
    """Memory of this process: of a GPU's allocator, and on a CPU all of it."""
    if not device.startswith("cuda"):
        return {"process": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    return {
        "reserved": torch.cuda.max_memory_reserved(),
        "reserved_last": torch.cuda.memory_reserved(),
        "allocated_whole_run": torch.cuda.max_memory_allocated(),
    }


def predict_reserved(recipe: Recipe) -> dict[str, int]:
    """Predicted memory of the allocator and of the whole process, if plan.json has none."""
    found = prepare(recipe).plan.reserved
    assert found is not None, "on a CPU there is none"
    return {"reserved": found.reserved, "process": found.process}


def main(words: list[str]) -> int:
    """Run the ordered case; an exception is recorded as its result."""
    results = Path(words[0])
    line = sys.stdin.readline()
    if not line:
        return 0
    order = json.loads(line)
    case, record = Case.parse(order["case"]), {"case": order["case"]}
    try:
        pauses = Pauses(results, sys.stdin)
        record |= run(
            case, Path(order["work"]), order["device"], pauses.wait, profile_above=order["profile_above"]
        )
    except torch.OutOfMemoryError as error:
        record["failed"] = f"out of memory: {first_line(error)}"
    except TrimtabError as error:
        record["failed"] = f"refused: {first_line(error)}"
    except Exception as error:  # noqa: BLE001 - recorded, and the other cases continue
        record["failed"] = f"{type(error).__name__}: {first_line(error)}"
    except Abandoned:
        return 1
    append_record(results, record)
    return int("failed" in record)


def clean_up(device: str) -> None:
    """Frees memory that is no longer used."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    faulthandler.enable()  # prints the stacks of all threads if C++ aborts the process
    sys.exit(main(sys.argv[1:]))
