"""Predicted and measured memory and time of runs by `trimtab train`, one JSON line per case.

    python -m benchmarks.plan_accuracy --device cuda --list development [--seconds 540] [--commit X]

Calibrates the machine once per commit, then runs the cases without a record for this commit. Each line is written when
its case is finished, so that an interrupted command resumes. `--table FILE` prints the errors.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.plan_accuracy import table
from benchmarks.plan_accuracy.cases import LISTS, Case
from benchmarks.plan_accuracy.readings import without_folders
from benchmarks.plan_accuracy.rounds import Rounds
from trimtab.facts.calibration import Calibration
from trimtab.facts.calibration_file import write_calibration
from trimtab.lab.records import Record, append_record, file_name, is_recorded, provenance, timestamp

RESULTS = Path(__file__).parents[1] / "results"
AT_ONCE = {"cuda": 8, "cpu": 1}
"""Processes at the same time: on a GPU several start while none is timed."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.plan_accuracy", description=__doc__.split("\n")[0]
    )
    made.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    made.add_argument("--list", default="development", choices=list(LISTS), dest="cases")
    made.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="cases whose name contains the text"
    )
    made.add_argument(
        "--out", type=Path, help="data (benchmarks/results/plan-accuracy-<list>-<device>.jsonl)"
    )
    made.add_argument(
        "--work", type=Path, default=Path("~/.cache/trimtab/plan-accuracy"), help="models and data"
    )
    made.add_argument("--seconds", type=float, default=1e9, help="approximate time of the command")
    made.add_argument("--case-seconds", type=float, default=240, help="time limit of each part of a case")
    made.add_argument("--at-once", type=int, help="processes at the same time (8 on a GPU)")
    made.add_argument(
        "--profile-above", type=float, metavar="SHARE", help="profile cases whose step time is off by more"
    )
    made.add_argument("--commit", help="the measured commit, if this is no git checkout")
    made.add_argument("--calibration-seconds", type=float, help="time for the calibration")
    made.add_argument("--no-calibration", action="store_true", help="use the existing calibration")
    made.add_argument("--retry-failed", action="store_true", help="repeat failed cases")
    made.add_argument("--table", type=Path, metavar="FILE", help="print the errors of a file and exit")
    return made


def main(words: list[str] | None = None) -> int:
    """Returns 0 if every case succeeded, 1 if some failed or are missing, 2 without a GPU."""
    options = parser().parse_args(words)
    if options.table:
        print(table.markdown(table.read(options.table, options.commit)), end="")
        return 0
    began = time.monotonic()
    where = ask_provenance(options.device, options.commit)
    if where is None:
        print("error: torch finds no CUDA device; --device cpu --list cpu runs tiny cases", file=sys.stderr)
        return 2
    slug = file_name(where["device"])
    path = options.out or RESULTS / f"plan-accuracy-{options.cases}-{slug}.jsonl"
    same = {"commit": where["commit"], "device": where["device"]}
    calibrate(path, options, where, same)

    def finish(record: Record) -> None:
        append_record(path, {**without_folders(record), **where, "time": timestamp(), "list": options.cases})
        print(line_of(record), file=sys.stderr, flush=True)

    stopped = Rounds(
        device=options.device,
        work=options.work.expanduser().resolve(),
        finish=finish,
        at_once=options.at_once or AT_ONCE[options.device],
        case_seconds=options.case_seconds,
        profile_above=options.profile_above,
        until=began + options.seconds,
    ).run(missing(path, chosen(options), same, retry=options.retry_failed))
    if stopped:
        print("stopped; the same command continues", file=sys.stderr)
        return 1
    remaining = missing(path, chosen(options), same, retry=False)
    records = table.read(path, where["commit"])
    print(table.markdown(records), end="")
    if remaining:
        print(f"{len(remaining)} cases remain; the same command continues", file=sys.stderr)
    return 1 if remaining or any("failed" in record for record in records.values()) else 0


def ask_provenance(device: str, commit: str | None) -> Record | None:
    """Device, versions and commit, queried in a child process to leave CUDA uninitialized here; None without GPU."""
    if device == "cpu":
        return provenance(device, commit=commit)
    code = (
        "import json, sys, torch; from trimtab.lab.records import provenance; "
        "print(json.dumps(provenance('cuda', commit=sys.argv[1] or None) if torch.cuda.is_available() else None))"
    )
    done = subprocess.run([sys.executable, "-c", code, commit or ""], stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


def chosen(options: argparse.Namespace) -> list[Case]:
    """The cases of the list that `--only` selects; all without it."""
    return [
        case
        for case in LISTS[options.cases]
        if not options.only or any(text in case.name for text in options.only)
    ]


def missing(path: Path, cases: list[Case], same: dict[str, Any], *, retry: bool) -> list[Case]:
    """The cases without a record for this commit and device; failed ones count as recorded unless `retry`."""
    records = table.read(path, same["commit"])

    def done(record: Record | None) -> bool:
        if record is not None and "failed" in record and not retry:
            record = {key: value for key, value in record.items() if key != "failed"}
        return is_recorded(record, same)

    return [case for case in cases if not done(records.get(case.name))]


def calibrate(path: Path, options: argparse.Namespace, where: Record, same: dict[str, Any]) -> None:
    """Calibrate the machine in a child process; saves the result for the planner and records it.

    A calibration of the same commit and device is used again, also of another list and from a machine that has been
    handed back: all cases of a commit are predicted from one calibration.
    """
    if options.no_calibration:
        return
    for file in (path, *sorted(path.parent.glob("plan-accuracy-*.jsonl"))):
        known = table.read_records(file, "calibration_of").get(same["commit"])
        if known and is_recorded(known, same):
            write_calibration(Calibration.from_dict(known["calibration"]))
            if file != path:
                append_record(path, known)
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
        raise SystemExit("error: the calibration failed, see above; --no-calibration skips it")
    made = json.loads(done.stdout.splitlines()[-1])
    for warning in made["warnings"]:
        print(f"calibration: {warning}", file=sys.stderr)
    append_record(path, {"calibration_of": same["commit"], **where, "calibration": made})


def line_of(record: Record) -> str:
    """A record as one line for the terminal."""
    if "failed" in record:
        return f"{record['case']}: {record['failed']}"
    parts = []
    for quantity, name in table.QUANTITIES.items():
        found = table.error(record, quantity)
        parts.append(f"{name} {'–' if found is None else f'{found:+.2%}'}")
    return f"{record['case']}: {', '.join(parts)} ({record['run_s']:.0f} s)"


if __name__ == "__main__":
    sys.exit(main())
