"""Verifies and then times every operation beside its peers.

    python -m benchmarks.kernels [--only OP] [--out FILE.jsonl] [--commit X]

Each finished case is one JSON line of the file, so that a run that was cut short goes on where it ended.
A contestant whose result is wrong gets no time, and the command ends with 1.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import pkgutil
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import benchmarks.kernels as here
from benchmarks import provenance
from benchmarks.kernels.case import Case, Contestant
from benchmarks.kernels.table import markdown, read
from trimtab.lab.timing import Ceilings, ceilings, peak_bytes, time_together

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


def all_cases(only: list[str]) -> list[Case]:
    """Those of every module here, or of the operations (or `operation/case`) named."""
    found: list[Case] = []
    for info in pkgutil.iter_modules(here.__path__):
        if info.name in ("__main__", "case", "table") or info.name.startswith("_"):
            continue
        module = importlib.import_module(f"{here.__name__}.{info.name}")
        if hasattr(module, "cases"):
            found += module.cases()
    return [case for case in found if not only or case.op in only or f"{case.op}/{case.name}" in only]


def versions() -> dict[str, str]:
    """Of Python, CUDA and whatever of `PACKAGES` is installed."""
    return {"cuda": str(torch.version.cuda), **provenance.versions(PACKAGES)}


def verified(contestant: Contestant) -> dict[str, Any]:
    """Whether the result is right, and the memory a run takes."""
    entry: dict[str, Any] = {"exact": contestant.exact, "ours": contestant.ours}
    try:
        sentence = contestant.check()
        if sentence is None or not contestant.exact:
            entry["peak_bytes"] = peak_bytes(contestant.run)
    except Exception as error:  # noqa: BLE001 - whatever a peer raises is its result, the others go on
        entry["note"] = f"raised {type(error).__name__}: {_first_line(error)}"
        return entry
    entry["error"] = sentence
    if "peak_bytes" not in entry:
        entry["note"] = f"wrong: {sentence}"
    return entry


def measure(case: Case, measured: Ceilings, options: argparse.Namespace) -> dict[str, Any]:
    """One case's record, without where and when."""
    bench = case.build()
    entries = {name: verified(contestant) for name, contestant in bench.contestants.items()}
    runs = {name: bench.contestants[name].run for name, entry in entries.items() if "note" not in entry}
    if runs:
        for name, timing in time_together(runs, rounds=options.rounds, budget_ms=options.budget_ms).items():
            entries[name] |= asdict(timing)
    return {"floor_ms": case.floor(measured) * 1e3, "contestants": entries, "absent": bench.absent}


def is_good(record: dict[str, Any]) -> bool:
    """Whether the case ran and all that promise to be exact were."""
    return not record.get("failed") and all("note" not in c for c in record["contestants"].values())


def run_all(cases: list[Case], path: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures what the file does not have for this commit, device and these versions."""
    measured = ceilings()
    where = {
        "commit": options.commit or provenance.commit(),
        "device": measured.device,
        "versions": versions(),
    }
    done = read(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    records = []
    for case in cases:
        old = done.get((case.op, case.name))
        if old and not options.fresh and is_good(old) and all(old[key] == where[key] for key in where):
            records.append(old)
            continue
        print(f"{case.op}/{case.name}", file=sys.stderr, flush=True)
        record: dict[str, Any] = {"op": case.op, "case": case.name, **where}
        record |= {"time": datetime.now(UTC).isoformat(timespec="seconds"), "ceilings": asdict(measured)}
        try:
            record |= measure(case, measured, options)
        except Exception as error:  # noqa: BLE001 - recorded as failed, the other cases go on
            record["failed"] = f"{type(error).__name__}: {_first_line(error)}"
            record |= {"floor_ms": None, "contestants": {}, "absent": {}}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
        records.append(record)
        clean_up()
    return records


def clean_up() -> None:
    """Memory goes back, and what was compiled for one case does not count against the next one's limit."""
    gc.collect()
    torch._dynamo.reset()
    torch.cuda.synchronize()  # raises after an illegal access: nothing measured from here on would be true
    torch.cuda.empty_cache()


def _first_line(error: Exception) -> str:
    return (str(error).strip() or "without a message").splitlines()[0][:200]


def main(words: list[str] | None = None) -> int:
    """0 if all is right, 1 if a case failed or a result was wrong, 2 where there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__.split("\n")[0])
    parser.add_argument("--only", action="append", default=[], metavar="OP", help="an operation, or op/case")
    parser.add_argument("--out", type=Path, help="data (benchmarks/results/kernels-<device>.jsonl)")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    parser.add_argument("--list", action="store_true", help="name the cases and stop")
    parser.add_argument("--table", type=Path, metavar="FILE.jsonl", help="print a file's table and stop")
    parser.add_argument("--fresh", action="store_true", help="measure again what the file already has")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget-ms", type=float, default=100, help="device time of one contestant")
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
            f"error: no case{''.join(f' {name}' for name in options.only)}; --list names them",
            file=sys.stderr,
        )
        return 2
    if not torch.cuda.is_available():
        print(
            "error: no CUDA device here; the benchmark needs one (--list and --table do not)", file=sys.stderr
        )
        return 2
    slug = torch.cuda.get_device_name().lower().replace("nvidia ", "").replace(" ", "-")
    path = options.out or RESULTS / f"kernels-{slug}.jsonl"
    records = run_all(cases, path, options)
    print(markdown(records), end="")
    return 0 if all(is_good(record) for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
