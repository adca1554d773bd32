"""Whole training steps vs. Hugging Face with peft and bitsandbytes, Liger and Unsloth; the longest context.

    python -m benchmarks.end_to_end [--only TEXT] [--out FILE.jsonl] [--weights DIR] [--minutes N] [--tiny]

Each case runs in a separate process and is one JSON line of the file, with device, versions and commit. The most
important cases run first, and an interrupted command resumes where it stopped. `--tiny` runs tiny models on a CPU, in
seconds per case.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.end_to_end.jobs import PEER_GIB, Case, cases, model_of, tiny_cases
from benchmarks.end_to_end.table import markdown, problems, read
from trimtab.lab.records import append_record, checkout_commit, file_name, is_recorded, timestamp, versions

RESULTS = Path(__file__).parents[1] / "results"
PACKAGES = ("torch", "triton", "transformers", "peft", "bitsandbytes", "liger_kernel", "unsloth")
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "UNSLOTH_DISABLE_STATISTICS": "1"}
"""No network access: peers would look for newer files, and one of them sends usage statistics."""


def limits_of(records: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Peak memory in GiB of the lowest-memory peer for each job, from this file or an earlier run."""
    limits = dict(PEER_GIB)
    for record in records.values():
        case = record.get("case") or {}
        if record.get("peak_bytes") and not case["contestant"].startswith("trimtab"):
            job = Case(**{**case, "job": _job(case["job"])}).job.name
            limits[job] = min(record["peak_bytes"] / 2**30, limits.get(job, float("inf")))
    return limits


def _job(fields: dict[str, Any]) -> Any:
    from benchmarks.end_to_end.jobs import Job

    return Job(**fields)


def processes(wanted: list[Case], share: bool) -> Iterator[list[Case]]:
    """Group cases by process: one each, or with `share` all cases with the same contestant and model."""
    if not share:
        yield from ([case] for case in wanted)
        return
    together: dict[tuple[Any, ...], list[Case]] = {}
    for case in wanted:
        # A memory cap, another limit or an empty cache needs a new process.
        alone = case.cap_gb is not None or bool(case.start) or case.contestant == "trimtab tight"
        key = (model_of(case), case.name if alone else "")
        together.setdefault(key, []).append(case)
    yield from together.values()


def run_process(batch: list[Case], request: dict[str, Any], cold: bool) -> tuple[list[dict[str, Any]], bool]:
    """Run cases in a separate process; returns (records, whether Ctrl-C stopped it). Cases without a record failed or
    were not started."""
    with tempfile.TemporaryDirectory() as folder:
        paths = Path(folder) / "request.json", Path(folder) / "results.jsonl"
        paths[0].write_text(json.dumps(request | {"cases": [asdict(case) for case in batch]}))
        environment = {**os.environ, **OFFLINE}
        if cold:
            environment |= {
                "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
                "TRITON_CACHE_DIR": f"{folder}/triton",
            }
        words = [sys.executable, "-m", "benchmarks.end_to_end.child", *map(str, paths)]
        limit = sum(case.limit_s for case in batch)
        log = Path(folder) / "log"
        with log.open("wb") as file:
            try:
                code = subprocess.run(
                    words, env=environment, stdout=file, stderr=subprocess.STDOUT, timeout=limit
                )
                ended = f"the process ended with {code.returncode}"
            except subprocess.TimeoutExpired:
                ended = f"stopped after {limit} s"
            except KeyboardInterrupt:
                ended = ""
        found = read(paths[1])
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
    if not ended:
        return list(found.values()), True
    records = [found["device"]] if "device" in found else []
    for case in batch:
        missing = {"name": case.name, "case": asdict(case), "failed": f"{ended}: {''.join(last)[:300]}"}
        records.append(found.get(case.name, missing))
    return records, False


def run_all(wanted: list[Case], path: Path, options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Measure the cases without a record for this commit and these versions; returns all records."""
    device = "cpu" if options.tiny else "cuda"
    where = {"commit": options.commit or checkout_commit(), "versions": versions(PACKAGES)}
    if sys.platform == "linux":
        where["host_cores"] = len(os.sched_getaffinity(0))
    records = {} if options.fresh else read(path)
    same = {} if options.missing else {key: where[key] for key in ("commit", "versions")}
    left = [case for case in wanted if not is_recorded(records.get(case.name), same)]
    until = time.monotonic() + 60 * options.minutes
    for batch in processes(left, options.share_processes):
        if time.monotonic() > until:
            print(f"out of time: {batch[0].name} and all later cases are not run", file=sys.stderr)
            break
        print(", ".join(case.name for case in batch), file=sys.stderr, flush=True)
        request = {
            "device": device,
            "weights": str(options.weights.expanduser()),
            "limits": limits_of(records),
            "ceilings": "device" not in records,
            "tokens": dict(word.split("=") for word in options.tokens),
            "most_tokens": options.most_tokens,
        }
        request["tokens"] = {cap: int(count) for cap, count in request["tokens"].items()}
        measured, stopped = run_process(batch, request, batch[0].start == "cold")
        for record in measured:
            record |= {**where, "time": timestamp()}
            record |= {"shared_process": len(batch) > 1}
            records[record["name"]] = record
            append_record(path, record)
            print("  " + _line(record), file=sys.stderr, flush=True)
        if stopped:
            print("stopped: finished cases are saved, and the next call continues", file=sys.stderr)
            break
    return records


def _line(record: dict[str, Any]) -> str:
    if "failed" in record or "absent" in record:
        return record.get("failed") or f"absent: {record['absent']}"
    if record["name"] == "device":
        return f"{record['device']}"
    time_ms = record.get("median_ms") or 1e3 * record["first_step_s"]
    memory = "" if record["peak_bytes"] is None else f" @ {record['peak_bytes'] / 2**30:.2f} GiB"
    return (
        f"{time_ms:.0f} ms{memory}, first step {record['first_step_s']:.1f} s, loss {record['losses'][0]:.4f}"
    )


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.end_to_end", description=__doc__.split("\n")[0])
    made.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="TEXT",
        help="the case of that name, or those whose name contains it",
    )
    made.add_argument("--out", type=Path, help="data (benchmarks/results/end-to-end-<device>.jsonl)")
    weights = Path("~/.cache/trimtab/benchmarks")
    made.add_argument("--weights", type=Path, default=weights, help="folder for random models (16 GB)")
    made.add_argument("--minutes", type=float, default=1e9, help="start no process after this time")
    made.add_argument("--tiny", action="store_true", help="tiny models on the CPU")
    made.add_argument(
        "--share-processes", action="store_true", help="load a contestant's model once for its lengths"
    )
    made.add_argument("--tokens", action="append", default=[], metavar="GB=N", help="longest: try N tokens")
    made.add_argument(
        "--most-tokens", type=int, default=2**19, help="longest: maximum sequence length to try"
    )
    made.add_argument("--commit", help="the measured commit, if this is no git checkout")
    made.add_argument("--fresh", action="store_true", help="repeat cases that the file already has")
    made.add_argument(
        "--missing",
        action="store_true",
        help="run only cases without a successful record of any commit or version",
    )
    made.add_argument("--list", action="store_true", help="list the cases and exit")
    made.add_argument("--table", type=Path, metavar="FILE.jsonl", help="print a file's tables and exit")
    return made


def chosen(found: list[Case], texts: list[str]) -> list[Case]:
    """The cases selected by `--only` (all without it): for each text the case of that name, or all that contain it."""
    names = {case.name for case in found}
    return [
        case
        for case in found
        if not texts or any(text == case.name or (text not in names and text in case.name) for text in texts)
    ]


def main(words: list[str] | None = None) -> int:
    """Returns 0, 1 if a trimtab case failed or losses differ, 2 without a GPU or a case."""
    options = parser().parse_args(words)
    if options.table:
        print(markdown(read(options.table)), end="")
        return 0
    found = tiny_cases() if options.tiny else cases()
    wanted = chosen(found, options.only)
    if options.list:
        print("\n".join(case.name for case in wanted))
        return 0
    if not wanted:
        print(f"error: no case matches {' or '.join(options.only)}; --list names them", file=sys.stderr)
        return 2
    slug = "cpu-tiny" if options.tiny else _gpu()
    if slug is None:
        print("error: no CUDA device; --tiny, --list and --table need none", file=sys.stderr)
        return 2
    records = run_all(wanted, options.out or RESULTS / f"end-to-end-{slug}.jsonl", options)
    print(markdown(records), end="")
    wrong = problems(records)
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


def _gpu() -> str | None:
    """The GPU's name for the file, queried in a child process: this process must not initialize CUDA."""
    code = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return file_name(done.stdout) or None


if __name__ == "__main__":
    sys.exit(main())
