"""Predicted and measured memory and time of runs by `trimtab train`, one JSON line per case.

    python -m benchmarks.plan_accuracy --device cuda --list development [--seconds 540] [--commit X]

Calibrates the machine first, once per commit, then runs the cases that the file does not have for this commit. Each
line is written as soon as its case is measured, so that a stopped command continues. `--table FILE` prints the errors.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.plan_accuracy import table
from benchmarks.plan_accuracy.cases import LISTS, Case
from trimtab.lab.records import Record, append_record, file_name, is_recorded, provenance, timestamp

RESULTS = Path(__file__).parents[1] / "results"
LEAST_SECONDS = 30.0
"""A process needs that long for its first case: none is started with less time left."""
GRACE_SECONDS = 15.0
"""Behind the end of `--seconds`: a case that still runs then is stopped, and run again by the next call."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.plan_accuracy", description=__doc__.split("\n")[0]
    )
    made.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    made.add_argument("--list", default="development", choices=list(LISTS), dest="cases")
    made.add_argument("--only", action="append", default=[], metavar="TEXT", help="cases that hold the text")
    made.add_argument(
        "--out", type=Path, help="data (benchmarks/results/plan-accuracy-<list>-<device>.jsonl)"
    )
    made.add_argument(
        "--work", type=Path, default=Path("~/.cache/trimtab/plan-accuracy"), help="models and data"
    )
    made.add_argument("--seconds", type=float, default=1e9, help="time of the whole command, about")
    made.add_argument("--case-seconds", type=float, default=240, help="a case that takes longer has failed")
    made.add_argument("--per-process", type=int, default=3, help="cases that share a process")
    made.add_argument("--commit", help="what is measured, where git cannot tell")
    made.add_argument("--calibration-seconds", type=float, help="time for the calibration")
    made.add_argument("--no-calibration", action="store_true", help="use the calibration that is there")
    made.add_argument("--retry-failed", action="store_true", help="run cases again that failed")
    made.add_argument("--table", type=Path, metavar="FILE", help="print the errors of a file and stop")
    return made


def main(words: list[str] | None = None) -> int:
    """0 if every case has a record that did not fail, 1 if some failed or are left."""
    options = parser().parse_args(words)
    if options.table:
        print(table.markdown(table.read(options.table, options.commit)), end="")
        return 0
    began = time.monotonic()
    where = ask_provenance(options.device, options.commit)
    if where is None:
        print(
            "error: torch sees no CUDA device here; --device cpu --list cpu runs tiny cases", file=sys.stderr
        )
        return 2
    slug = file_name(where["device"])
    path = options.out or RESULTS / f"plan-accuracy-{options.cases}-{slug}.jsonl"
    same = {"commit": where["commit"], "device": where["device"]}
    calibrate(path, options, where, same)
    left = missing(path, chosen(options), same, retry=options.retry_failed)
    while left and began + options.seconds - time.monotonic() > LEAST_SECONDS:
        until = began + options.seconds
        done, interrupted = run_process(left[: options.per_process], options, path, where, until)
        left = [case for case in left if case.name not in done]
        if interrupted:
            print("stopped; the same command continues", file=sys.stderr)
            return 1
    records = table.read(path, where["commit"])
    print(table.markdown(records), end="")
    if left:
        print(f"{len(left)} cases are left; the same command continues", file=sys.stderr)
    return 1 if left or any("failed" in record for record in records.values()) else 0


def ask_provenance(device: str, commit: str | None) -> Record | None:
    """Device, versions and commit, asked in a process of its own: this one leaves the GPU alone. None without one."""
    if device == "cpu":
        return provenance(device, commit=commit)
    code = (
        "import json, sys, torch; from trimtab.lab.records import provenance; "
        "print(json.dumps(provenance('cuda', commit=sys.argv[1] or None) if torch.cuda.is_available() else None))"
    )
    done = subprocess.run([sys.executable, "-c", code, commit or ""], stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def chosen(options: argparse.Namespace) -> list[Case]:
    """The cases of the list that `--only` names; all without it."""
    return [
        case
        for case in LISTS[options.cases]
        if not options.only or any(text in case.name for text in options.only)
    ]


def missing(path: Path, cases: list[Case], same: dict[str, Any], *, retry: bool) -> list[Case]:
    """Those without a record of this commit and device; failures count as recorded unless they are to be retried.

    Cases of one model follow each other, so that a process reads the same files.
    """
    records = table.read(path, same["commit"])

    def done(record: Record | None) -> bool:
        if record is not None and "failed" in record and not retry:
            record = {key: value for key, value in record.items() if key != "failed"}
        return is_recorded(record, same)

    return [case for case in cases if not done(records.get(case.name))]


def calibrate(path: Path, options: argparse.Namespace, where: Record, same: dict[str, Any]) -> None:
    """Measures the machine in a process of its own; kept where the planner reads it, and recorded."""
    known = table.read_records(path, "calibration_of").get(same["commit"])
    if options.no_calibration or (known and is_recorded(known, same)):
        return
    print("calibrating", file=sys.stderr, flush=True)
    code = (
        "import json, sys; from trimtab.lab.calibrate import calibrate; "
        "from trimtab.facts.calibration_file import write_calibration; "
        "made = calibrate(sys.argv[1], seconds=float(sys.argv[2]) or None); "
        "print(write_calibration(made), file=sys.stderr); print(json.dumps(made.to_dict()))"
    )
    words = [sys.executable, "-c", code, options.device, str(options.calibration_seconds or 0)]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise SystemExit("error: the calibration failed, see above; --no-calibration leaves it out")
    made = json.loads(done.stdout.splitlines()[-1])
    for warning in made["warnings"]:
        print(f"calibration: {warning}", file=sys.stderr)
    append_record(path, {"calibration_of": same["commit"], **where, "calibration": made})


def run_process(
    batch: list[Case], options: argparse.Namespace, path: Path, where: Record, until: float
) -> tuple[set[str], bool]:
    """Runs cases in one process; (names of those with a record now, whether Ctrl-C stopped it).

    The process is ended where a case takes too long, or when the time is up: then the case that is running has no
    record and is run again by the next call.
    """
    with tempfile.TemporaryDirectory() as folder:
        order, results, log = (Path(folder) / name for name in ("order.json", "results.jsonl", "log"))
        work = str(options.work.expanduser().resolve())
        used = memory_used() if options.device == "cuda" else 0
        plain = {"cases": [case.name for case in batch], "device": options.device, "work": work}
        plain |= {"used_before": used, "seconds": until - time.monotonic()}
        order.write_text(json.dumps(plain))
        words = [sys.executable, "-m", "benchmarks.plan_accuracy.worker", str(order), str(results)]
        with log.open("wb") as file:
            process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env=dict(os.environ))
            watch = _Watch(process, results, batch, options.case_seconds, until)
            try:
                for record in watch.records():
                    append_record(path, {**record, **where, "time": timestamp(), "list": options.cases})
                    print(line_of(record), file=sys.stderr, flush=True)
                    watch.done.add(record["case"])
            except KeyboardInterrupt:
                return watch.done, True
            finally:
                if process.poll() is None:
                    process.kill()
                process.wait()
        if watch.ended_early:
            last = log.read_text(errors="replace").strip().splitlines()[-1:]
            record = {"case": watch.running, "failed": f"{watch.ended_early}: {''.join(last)[:300]}"}
            append_record(path, {**record, **where, "time": timestamp(), "list": options.cases})
            print(line_of(record), file=sys.stderr, flush=True)
            watch.done.add(watch.running)
    return watch.done, False


@dataclasses.dataclass
class _Watch:
    """The records of a worker as they come, and how it ended."""

    process: subprocess.Popen[bytes]
    results: Path
    batch: list[Case]
    case_seconds: float
    until: float
    done: set[str] = dataclasses.field(default_factory=set)
    running: str = ""
    ended_early: str = ""
    """Why the running case has failed; empty if none has."""

    def records(self) -> Any:
        """Each finished case; returns when all are done, the process ended, or a case or all took too long."""
        seen, since = 0, time.monotonic()
        self.running = self.batch[0].name
        while True:
            ended = self.process.poll() is not None
            text = self.results.read_text() if self.results.exists() else ""
            lines = text[: text.rfind("\n") + 1].splitlines()  # without a line that is being written
            for line in lines[seen:]:
                record = json.loads(line)
                since, seen = time.monotonic(), seen + 1
                if "started" in record:
                    self.running = record["started"]
                else:
                    self.running = ""
                    yield record
            if ended:
                break
            if time.monotonic() > self.until + GRACE_SECONDS:
                return
            if time.monotonic() - since > self.case_seconds:
                self.ended_early = f"stopped after {self.case_seconds:.0f} s"
                return
            time.sleep(0.2)
        if self.running:
            self.ended_early = f"the process ended with {self.process.returncode}"


def memory_used() -> int:
    """Bytes of the GPU that other processes use, by nvidia-smi; 0 where it cannot be asked."""
    words = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    first = done.stdout.strip().splitlines()[:1]
    return int(first[0]) * 2**20 if first and first[0].strip().isdigit() else 0


def line_of(record: Record) -> str:
    """One line for the terminal."""
    if "failed" in record:
        return f"{record['case']}: {record['failed']}"
    parts = []
    for quantity, name in table.QUANTITIES.items():
        found = table.error(record, quantity)
        parts.append(f"{name} {'–' if found is None else f'{found:+.2%}'}")
    return f"{record['case']}: {', '.join(parts)} ({record['run_s']:.0f} s)"


if __name__ == "__main__":
    sys.exit(main())
