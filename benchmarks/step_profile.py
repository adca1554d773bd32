"""Profiles training steps: time and memory of whole steps, then the kernels of one step by name.

    python -m benchmarks.step_profile JOB [JOB …] [--limit GiB] [--set KEY=VALUE] [--weights DIR] [--out FILE]

A job is named as in `benchmarks.end_to_end`: "llama-8b qlora 2×2048", "qwen3-0.6b full 4×1024 packed". All run in one
process, one after another; with a limit, in a process each.
"""

from __future__ import annotations

import argparse
import gc
import re
import statistics
import sys
from pathlib import Path

import torch
from ruamel.yaml import YAML

from benchmarks.end_to_end import ours, world
from benchmarks.end_to_end.jobs import Case, Job
from trimtab.lab.profiles import profile_run
from trimtab.lab.records import checkout_commit
from trimtab.lab.timing import time_once
from trimtab.trainer.graphs import WARM_UP


def job_of(name: str) -> Job:
    """Parse a job's name.

    Example:
        >>> job_of("llama-8b qlora 2×2048 packed").rows
        2
    """
    found = re.fullmatch(r"(\S+) (full|qlora) (\d+)[×x](\d+)( packed)?", name)
    if found is None:
        raise SystemExit(f"error: {name!r} is not a job; write MODEL full|qlora ROWS×TOKENS [packed]")
    model, method, rows, tokens, packed = found.groups()
    return Job(model, method, int(rows), int(tokens), packed is not None)


def report(job: Job, options: argparse.Namespace, device: str) -> list[str]:
    """Times, memory and kernels of one job."""
    folder = world.model_folder(options.weights, job.model, device)
    adapter = world.adapter_folder(options.weights, job.model)
    contestant = "trimtab" if options.limit is None else "trimtab tight"
    more = {key: YAML(typ="safe").load(value) for key, value in (word.split("=", 1) for word in options.set)}
    prepared = ours.prepared_for(Case(job, contestant), folder, adapter, device, options.limit, more)
    step, chosen = ours.build(prepared, folder, world.make_tokens(job))
    losses: list[float] = []
    steps = range(WARM_UP + 1 + options.steps)
    times = [time_once(lambda: losses.append(float(step())), device) for _ in steps]
    timed = [1e3 * t for t in times[WARM_UP + 1 :]]
    lines = [f"===== {job.name}, limit {options.limit} GiB, {' '.join(options.set)}"]
    lines.append(f"median {statistics.median(timed):.1f} ms, least {min(timed):.1f}, first {times[0]:.2f} s")
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_reserved()
        lines.append(
            f"peak of tensors {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB, "
            f"{chosen['predicted_bytes'] / 2**30:.2f} predicted for the whole process; "
            f"reserved {reserved / 2**30:.2f}, outside the allocator {(total - free - reserved) / 2**30:.2f}"
        )
    lines.append(f"losses {[round(loss, 4) for loss in losses]}")
    lines.append(f"chosen {chosen}")
    return lines + profile_run(step, device).lines()


def main() -> int:
    """0, or 1 if a job failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("jobs", nargs="+", metavar="JOB")
    parser.add_argument("--limit", type=float, help="memory limit for tensors, GiB")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a key of the recipe")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--weights", type=Path, default=Path("~/.cache/trimtab/benchmarks").expanduser())
    parser.add_argument("--out", type=Path, help="file to append to")
    parser.add_argument("--commit", help="the measured commit, if this is no git checkout")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    failed = False
    for name in options.jobs:
        try:
            lines = [f"commit {options.commit or checkout_commit()}", *report(job_of(name), options, device)]
        except torch.OutOfMemoryError as error:
            lines, failed = [f"===== {name}: {error}"], True
        print("\n".join(lines), flush=True)
        if options.out is not None:
            with options.out.open("a", encoding="utf-8") as file:
                file.write("\n".join(lines) + "\n")
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
