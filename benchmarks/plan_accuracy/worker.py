"""A process of the benchmark: trains its cases one after another and writes one JSON line per case.

python -m benchmarks.plan_accuracy.worker RESULTS.jsonl < ORDER.json

It imports torch before it reads the order, so that it can be started while an earlier process measures.
"""

from __future__ import annotations

import contextlib
import gc
import json
import re
import resource
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.plan_accuracy.cases import Case
from benchmarks.plan_accuracy.durations import expected_seconds, steps_of
from benchmarks.plan_accuracy.inputs import recipe_of
from benchmarks.plan_accuracy.readings import predicted, step_times
from trimtab import launch
from trimtab.facts.errors import TrimtabError
from trimtab.lab.contests import first_line
from trimtab.lab.records import append_record
from trimtab.plan.reserved import reserved_memory
from trimtab.recipe import Recipe, build
from trimtab.report import LiveView
from trimtab.run.prepare import prepare

POLL_SECONDS = 0.05


class Enough(BaseException):
    """Raised after the last measured step. Not an Exception: before one propagates, the training loop saves a
    checkpoint, which can take longer than the steps."""


class DeviceMemory:
    """Context manager that measures the peak GPU memory in use by all processes."""

    def __init__(self, device: str) -> None:
        self.cuda, self.peak = device.startswith("cuda"), 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)

    def _poll(self) -> None:
        while not self._done.wait(POLL_SECONDS):
            self._look()

    def _look(self) -> None:
        free, total = torch.cuda.mem_get_info()
        self.peak = max(self.peak, total - free)

    def __enter__(self) -> DeviceMemory:
        if self.cuda:
            torch.cuda.init()
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.cuda:
            self._look()
            self._done.set()
            self._thread.join()
        else:
            self.peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def run(case: Case, order: dict[str, Any]) -> dict[str, Any]:
    """Train a case; returns predictions, measurements and choices."""
    root, device = Path(order["work"]), order["device"]
    folder = root / "runs" / re.sub(r"[^a-z0-9.]+", "-", case.name)
    shutil.rmtree(folder, ignore_errors=True)
    recipe = build(recipe_of(case, root, folder, device))
    clean_up(device)  # large weights were initialized on the device
    steps = steps_of(case)

    def after_step(step: int) -> None:
        if step >= steps.total:
            raise Enough

    with DeviceMemory(device) as memory, LiveView(console=Console(quiet=True)) as view:
        started = time.perf_counter()
        with contextlib.suppress(Enough):
            launch.train(recipe, view, after_step=after_step)
        seconds = time.perf_counter() - started
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    peak = next(row for row in rows if row["kind"] == "memory" and row["when"] == "peak")
    buckets = ("weights", "gradients", "optimizer", "activations", "other")
    measured: dict[str, Any] = {
        "allocated": sum(peak[bucket] for bucket in buckets),
        "buckets": {bucket: peak[bucket] for bucket in buckets},
        "process": memory.peak - order["used_before"],
        **step_times(rows, steps.together, steps.warm_up),
    }
    if device.startswith("cuda"):
        measured["reserved"] = torch.cuda.max_memory_reserved()
        measured["allocated_whole_run"] = torch.cuda.max_memory_allocated()
    plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    choices = json.loads((folder / "choices.json").read_text(encoding="utf-8"))
    prediction = predicted(plan)
    if prediction["reserved"] is None and device.startswith("cuda"):
        prediction |= predict_reserved(recipe)
    shutil.rmtree(folder, ignore_errors=True)
    kept = ("dtype", "weights_dtype", "gradient_dtype", "graphs", "compile", "memory", "loss", "optimizer")
    chosen = {key: choices[key] for key in kept if key in choices}
    return {"predicted": prediction, "measured": measured, "chosen": chosen, "run_s": round(seconds, 2)}


def predict_reserved(recipe: Recipe) -> dict[str, int]:
    """Predicted memory of the allocator and of the whole process, if plan.json has none."""
    prepared = prepare(recipe)
    found = reserved_memory(prepared.plan.job, graphs=prepared.resolved.graphs.enabled)
    return {"reserved": found.reserved, "process": found.process}


def main(words: list[str]) -> int:
    """Run the order's cases; an exception is recorded as a case's result. After a failure the process ends, so that the
    next case starts with clean memory."""
    order, results = json.loads(sys.stdin.read() or '{"cases": []}'), Path(words[0])
    began = time.monotonic()
    for position, line in enumerate(order["cases"]):
        case = Case.parse(line)
        remaining = order["seconds"] - (time.monotonic() - began)
        if position and remaining < expected_seconds(case, Path(order["work"])):
            continue
        append_record(results, {"started": line})
        record: dict[str, Any] = {"case": line, "fresh_process": position == 0}
        try:
            record |= run(case, order)
        except torch.OutOfMemoryError as error:
            record["failed"] = f"out of memory: {first_line(error)}"
        except TrimtabError as error:
            record["failed"] = f"refused: {first_line(error)}"
        except Exception as error:  # noqa: BLE001 - recorded, and the other cases continue
            record["failed"] = f"{type(error).__name__}: {first_line(error)}"
        append_record(results, record)
        if "failed" in record:
            return 1
        clean_up(order["device"])
    return 0


def clean_up(device: str) -> None:
    """Frees memory that is no longer used."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
