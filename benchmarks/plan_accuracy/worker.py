"""A process of the benchmark: trains one case and writes what it measured as a JSON line.

python -m benchmarks.plan_accuracy.worker RESULTS.jsonl < ORDERS

It waits for a line on its standard input before it loads weights, before the timed steps, and before it ends: `rounds`.
"""

from __future__ import annotations

import contextlib
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

from benchmarks.plan_accuracy.cases import Case
from benchmarks.plan_accuracy.durations import steps_of
from benchmarks.plan_accuracy.inputs import recipe_of
from benchmarks.plan_accuracy.readings import predicted, step_times
from benchmarks.plan_accuracy.rounds import Moment
from trimtab import launch
from trimtab.facts.errors import TrimtabError
from trimtab.lab.contests import first_line
from trimtab.lab.records import append_record
from trimtab.plan.reserved import reserved_memory
from trimtab.recipe import Recipe, build
from trimtab.report import LiveView
from trimtab.run.prepare import prepare


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

    def plan(self, plan: dict[str, Any]) -> None:
        """Reports the memory that the run needs."""
        self.wait(Moment.PLANNED, needs=plan["memory"]["needed"])


def run(
    case: Case, root: Path, device: str, wait: Callable[..., float] = lambda moment, **facts: 0.0
) -> dict[str, Any]:
    """Train a case; returns predictions, measurements and choices. `wait` is called at each moment."""
    folder = root / "runs" / re.sub(r"[^a-z0-9.]+", "-", case.name)
    shutil.rmtree(folder, ignore_errors=True)
    recipe = build(recipe_of(case, root, folder, device))
    clean_up(device)  # large weights were initialized on the device
    steps = steps_of(case)
    measured: dict[str, Any] = {}
    waited = 0.0

    def after_step(step: int) -> None:
        nonlocal waited
        if step == steps.together * steps.warm_up:
            waited = wait(Moment.WARM)
        if step >= steps.total:
            measured.update(memory_of(device))
            wait(Moment.MEASURED)
            raise Enough

    with PausingView(wait) as view:
        started = time.perf_counter()
        with contextlib.suppress(Enough):
            launch.train(recipe, view, after_step=after_step)
        seconds = time.perf_counter() - started
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    peak = next(row for row in rows if row["kind"] == "memory" and row["when"] == "peak")
    buckets = ("weights", "gradients", "optimizer", "activations", "other")
    measured |= {
        "allocated": sum(peak[bucket] for bucket in buckets),
        "buckets": {bucket: peak[bucket] for bucket in buckets},
        **step_times(rows, steps.together, steps.warm_up, waited),
    }
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    choices = json.loads((folder / "choices.json").read_text(encoding="utf-8"))
    prediction = predicted(plan)
    if prediction["reserved"] is None and device.startswith("cuda"):
        prediction |= predict_reserved(recipe)
    shutil.rmtree(folder, ignore_errors=True)
    kept = ("dtype", "weights_dtype", "gradient_dtype", "graphs", "compile", "memory", "loss", "optimizer")
    chosen = {key: choices[key] for key in kept if key in choices}
    return {"predicted": prediction, "measured": measured, "chosen": chosen, "run_s": round(seconds, 2)}


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
    prepared = prepare(recipe)
    found = reserved_memory(prepared.plan.job, graphs=prepared.resolved.graphs.enabled)
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
        record |= run(case, Path(order["work"]), order["device"], Pauses(results, sys.stdin).wait)
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
    sys.exit(main(sys.argv[1:]))
