"""Verifies and times every operation and its peers.

    python -m benchmarks.kernels [--only OP] [--out FILE.jsonl] [--commit X]

Each finished case is one JSON line of the file, so that an interrupted run resumes where it stopped.
An implementation with a wrong result is not timed, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import pkgutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import benchmarks.kernels as here
from benchmarks.kernels.table import markdown, read
from trimtab.lab.contests import Contest, first_line, is_good, measure_case
from trimtab.lab.records import append_record, file_name, is_recorded, provenance, timestamp
from trimtab.lab.timing import ceilings

RESULTS = Path(__file__).parents[1] / "results"
PACKAGES = (
    "torch",
    "triton",
    "bitsandbytes",
    "liger_kernel",
    "cut_cross_entropy",
    "unsloth",
    "torchao",
    "flash_attn",
)


def all_cases(only: list[str]) -> list[Contest]:
    """The cases of all modules in this folder, or of the named operations (or `operation/case`)."""
    found: list[Contest] = []
    for info in pkgutil.iter_modules(here.__path__):
        if info.name in ("__main__", "table") or info.name.startswith("_"):
            continue
        module = importlib.import_module(f"{here.__name__}.{info.name}")
        if hasattr(module, "cases"):
            found += module.cases()
    return [case for case in found if not only or case.op in only or f"{case.op}/{case.name}" in only]


def run_all(cases: list[Contest], path: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures the cases that have no record for this commit, device and these versions."""
    measured = ceilings()
    where = {**provenance("cuda", PACKAGES, options.commit), "device": measured.device}
    same = {key: where[key] for key in ("commit", "device", "versions")}
    done = read(path)
    records = []
    for case in cases:
        old = done.get((case.op, case.name))
        if old and not options.fresh and is_good(old) and is_recorded(old, same):
            records.append(old)
            continue
        print(f"{case.op}/{case.name}", file=sys.stderr, flush=True)
        record: dict[str, Any] = {"op": case.op, "case": case.name, **where, "time": timestamp()}
        record["ceilings"] = asdict(measured)
        try:
            record |= measure_case(case, measured, rounds=options.rounds, budget_ms=options.budget_ms)
        except Exception as error:  # noqa: BLE001 - recorded as failed, the other cases continue
            record["failed"] = f"{type(error).__name__}: {first_line(error)}"
            record |= {"floor_ms": None, "contestants": {}, "absent": {}}
        append_record(path, record)
        records.append(record)
        clean_up()
    return records


def clean_up() -> None:
    """Frees memory, and resets torch.compile, whose recompile limit would otherwise count earlier cases."""
    gc.collect()
    torch._dynamo.reset()
    torch.cuda.synchronize()  # raises after an illegal access, which invalidates all later measurements
    torch.cuda.empty_cache()


def main(words: list[str] | None = None) -> int:
    """Returns the exit code: 1 if a case failed or a result was wrong, 2 if there is no GPU or no matching case, else
    0."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__.split("\n")[0])
    parser.add_argument("--only", action="append", default=[], metavar="OP", help="an operation, or op/case")
    parser.add_argument("--out", type=Path, help="data (benchmarks/results/kernels-<device>.jsonl)")
    parser.add_argument("--commit", help="the measured commit, if this is not a git checkout")
    parser.add_argument("--list", action="store_true", help="list the cases and exit")
    parser.add_argument("--table", type=Path, metavar="FILE.jsonl", help="print a file's table and exit")
    parser.add_argument("--fresh", action="store_true", help="repeat cases that the file already has")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget-ms", type=float, default=100, help="device time per implementation")
    options = parser.parse_args(words)
    if options.table:
        print(markdown(list(read(options.table).values())), end="")
        return 0
    cases = all_cases(options.only)
    if options.list:
        print("\n".join(f"{case.op}/{case.name}" for case in cases))
        return 0
    if not cases:
        print(
            f"error: there is no case{''.join(f' {name}' for name in options.only)}; `--list` lists them",
            file=sys.stderr,
        )
        return 2
    if not torch.cuda.is_available():
        print("error: no CUDA device; the benchmark needs one (--list and --table do not)", file=sys.stderr)
        return 2
    path = options.out or RESULTS / f"kernels-{file_name(torch.cuda.get_device_name())}.jsonl"
    records = run_all(cases, path, options)
    print(markdown(records), end="")
    return 0 if all(is_good(record) for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
