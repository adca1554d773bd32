"""Runs the GPU tests in pieces: `python -m tools.gpu_tests --out FILE.jsonl [--seconds 540] [--workers 12]`.

Each result is one JSON line of the file, written when the test ends. An interrupted command resumes: tests that passed
or were skipped at this commit on this device are not repeated. Tests marked `alone`, which measure time, run last and
in one process; the others run in several processes, if pytest-xdist is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from trimtab.lab.records import append_record, checkout_commit, read_records

ROOT = Path(__file__).resolve().parents[1]
PLUGIN = "tools.gpu_tests"
SHUTDOWN_SECONDS = 10.0
"""After an interrupt, pytest gets this long to end; then it is killed."""
LEAST_SECONDS = 20.0
"""With less time remaining no further pytest process is started."""
ENDED_WELL = ("passed", "skipped")
REGULAR_EXITS = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
ERROR_LINES = 30
"""Lines of pytest's output that are printed if it ends irregularly, for instance if a test file cannot be imported."""


# The plugin: pytest loads this module by name, in the main process and in xdist's workers.


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the plugin."""
    parser.addoption("--results-to", help="file to which results are appended as JSON lines")
    parser.addoption("--skip-listed", help="file with names of tests that are not repeated")
    parser.addoption("--tested-commit", default="unknown")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect tests that already have a result."""
    listed = set(Path(config.getoption("--skip-listed")).read_text().splitlines())
    done = [item for item in items if item.nodeid in listed]
    if done:
        config.hook.pytest_deselected(items=done)
        items[:] = [item for item in items if item.nodeid not in listed]


class Recorder:
    """Writes the result of each test: the worst of its phases."""

    def __init__(self, path: Path, commit: str) -> None:
        self.path, self.commit = path, commit
        self.phases: dict[str, list[pytest.TestReport]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect setup, call and teardown; append the record after the last."""
        phases = self.phases.setdefault(report.nodeid, [])
        phases.append(report)
        if report.when == "teardown":
            append_record(self.path, self._record(self.phases.pop(report.nodeid)))

    def _record(self, phases: Sequence[pytest.TestReport]) -> dict[str, Any]:
        outcomes = [phase.outcome for phase in phases]
        outcome = next((one for one in ("failed", "skipped") if one in outcomes), "passed")
        record: dict[str, Any] = {
            "test": phases[0].nodeid,
            "outcome": outcome,
            "seconds": round(sum(phase.duration for phase in phases), 2),
            "commit": self.commit,
        }
        if outcome != "passed":
            bad = next(phase for phase in phases if phase.outcome == outcome)
            record["reason"] = bad.longreprtext[-2000:]
        return record


def pytest_configure(config: pytest.Config) -> None:
    """Record in the main process only, which receives the workers' reports."""
    path = config.getoption("--results-to", None)
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(Path(path), config.getoption("--tested-commit")))


# The command


def results(path: Path, commit: str) -> dict[str, dict[str, Any]]:
    """The last result of each test at a commit."""
    return {name: one for name, one in read_records(path, "test").items() if one["commit"] == commit}


def run_pytest(options: argparse.Namespace, marks: str, parallel: bool, until: float) -> None:
    """Run the tests with these marks that have no result yet, until they end or the time does."""
    finished = [n for n, one in results(options.out, options.commit).items() if one["outcome"] in ENDED_WELL]
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "listed"
        listed.write_text("\n".join(finished))
        # pytest would take the folder of these files for the root, and find neither its settings nor conftest.py
        words = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT)]
        words += ["-p", PLUGIN, "-m", marks, "-q", "--tb=short"]
        words += ["--results-to", str(options.out.resolve()), "--skip-listed", str(listed)]
        words += ["--tested-commit", options.commit, *options.paths]
        if parallel and options.workers > 1 and importlib.util.find_spec("xdist"):
            words += ["-n", str(options.workers), "--dist", "worksteal"]
        output = Path(folder) / "output"
        with output.open("wb") as file:
            log = None if options.verbose else file
            process = subprocess.Popen(
                words, cwd=ROOT, env=environment(), stdout=log, stderr=log, start_new_session=True
            )
            try:
                process.wait(timeout=max(1.0, until - time.monotonic()))
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                stop(process)
                return
        if process.returncode not in REGULAR_EXITS:
            lines = output.read_text(errors="replace").splitlines()[-ERROR_LINES:]
            print(
                "\n".join([*lines, f"error: pytest ended with exit code {process.returncode}"]),
                file=sys.stderr,
            )


def environment() -> dict[str, str]:
    """The environment of pytest, in which processes started by tests import trimtab, installed or not."""
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path)}


def stop(process: subprocess.Popen[bytes]) -> None:
    """Interrupt pytest and its workers; kill them if they do not end."""
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(timeout=SHUTDOWN_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def table(found: dict[str, dict[str, Any]]) -> str:
    """Counts by outcome, the failures, and the slowest tests."""
    counts = Counter(one["outcome"] for one in found.values())
    lines = [", ".join(f"{count} {outcome}" for outcome, count in counts.most_common()) or "no result"]
    lines += [f"FAILED {one['test']}: {_cause(one)}" for one in found.values() if one["outcome"] == "failed"]
    slowest = sorted(found.values(), key=lambda one: -one["seconds"])[:5]
    lines += [f"{one['seconds']:7.1f} s  {one['test']}" for one in slowest]
    return "\n".join(lines)


def _cause(record: dict[str, Any]) -> str:
    """The line with the exception, or the last one."""
    lines = record["reason"].strip().splitlines()
    return next((line[1:].strip() for line in lines if line.startswith("E ")), lines[-1])[:160]


def collected(options: argparse.Namespace) -> int:
    """The number of selected tests."""
    words = [sys.executable, "-m", "pytest", "-m", options.marks, "--collect-only", "-qq", *options.paths]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    return sum(int(line.rsplit(":", 1)[1]) for line in done.stdout.splitlines() if ".py: " in line)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m tools.gpu_tests", description=(__doc__ or "").splitlines()[0]
    )
    made.add_argument("paths", nargs="*", help="files or tests; all by default")
    made.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl")
    made.add_argument("--commit", help="the tested commit, if this is no git checkout")
    made.add_argument("--seconds", type=float, default=1e9, help="approximate time of the command")
    made.add_argument("--workers", type=int, default=min(12, os.cpu_count() or 1))
    made.add_argument("--marks", default="gpu", help="pytest's mark expression")
    made.add_argument("--table", action="store_true", help="print the file's results and exit")
    made.add_argument("--verbose", action="store_true", help="show pytest's output")
    return made


def main(words: list[str] | None = None) -> int:
    """Returns 0 if all selected tests have a result and none failed, otherwise 1; 2 if none is selected."""
    options = parser().parse_args(words)
    options.commit = options.commit or checkout_commit()
    until = time.monotonic() + options.seconds
    total = collected(options)
    if total == 0:
        print(f"error: no test has the marks {options.marks!r}; name other paths or --marks", file=sys.stderr)
        return 2
    if not options.table:
        for marks, parallel in (
            (f"({options.marks}) and not alone", True),
            (f"({options.marks}) and alone", False),
        ):
            if until - time.monotonic() > LEAST_SECONDS:
                run_pytest(options, marks, parallel, until)
    found = results(options.out, options.commit)
    print(table(found))
    left = total - len(found)
    if left > 0:
        print(f"{left} of {total} tests have no result; the same command continues")
    return int(left > 0 or any(one["outcome"] == "failed" for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
