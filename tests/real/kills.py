"""Kills real `trimtab train` processes with kill -9 at random instants, and proves that nothing is lost by it.

    python -m tests.real.kills --count 100
    make kills

A run of a tiny model is started and killed over and over: in its first second, while its folder is made, before its
first checkpoint, while it saves, while it trains, while it is resumed. Two supervisors take turns: one resumes whatever
folder exists and starts the recipe when there is none; the other starts the recipe and resumes when that is refused
because the folder holds a run. In the end each run must have come to its last step, with every loss bit-identical to
an uninterrupted run's.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.run.run_kill import losses
from tests.tiny_model import write_recipe

ROOT = Path(__file__).resolve().parents[2]
STEPS = 30
KILLS_PER_RUN = 5
PATIENCE = 300
"""Time limit of a process in seconds."""


class Supervisor:
    """Starts processes for one run folder until it is finished."""

    def __init__(self, recipe: Path, run: Path, *, resume_first: bool) -> None:
        self.recipe, self.run, self.resume_first = recipe, run, resume_first
        self.has_run = False
        self.errors = run.with_suffix(".err")

    def start(self) -> subprocess.Popen[bytes]:
        """The next process."""
        if self.run.exists() if self.resume_first else self.has_run:
            words = ["--resume", str(self.run)]
        else:
            words = [str(self.recipe), f"output_dir={self.run}"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with self.errors.open("wb") as errors:
            return subprocess.Popen(
                [sys.executable, "-m", "trimtab", "train", *words],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )

    def ended(self, code: int) -> str | None:
        """What was wrong with a process that ended by itself; None if it did what it should."""
        said = self.errors.read_text()
        if code == 5 and not self.resume_first and "already contains a run" in said:
            self.has_run = True
            return None
        return None if code == 0 else f"exit code {code}: {said.strip()[-500:]}"


def phase(run: Path) -> str:
    """What a process was doing when it was killed, by what it left."""
    if not run.exists():
        return "before the folder"
    if not (run / "choices.json").is_file():
        return "start-up"
    saving = any((run / "checkpoints").glob(".tmp-*"))
    if any((run / "checkpoints").glob("step-*")):
        return "a save" if saving else "training or resuming"
    return "the first save" if saving else "before the first checkpoint"


def instants(chance: random.Random, seconds: float, run: Path, *, early: bool) -> Callable[[float], bool]:
    """Whether to kill now, as a function of the seconds since the process started."""
    kind = chance.choice(["time", "folder", "begun"] if early else ["time", "save", "save", "step"])
    delay = chance.uniform(0.0, 0.3 if kind in ("folder", "step") else 0.05)
    at = chance.uniform(0.0, 0.8 * seconds)
    seen: list[float] = []
    before = _records(run)

    def happened() -> bool:
        if kind == "folder":
            return run.exists()
        if kind == "begun":
            return (run / "choices.json").is_file()
        if kind == "save":
            return any((run / "checkpoints").glob(".tmp-*"))
        return _records(run) > before

    def now(elapsed: float) -> bool:
        if kind == "time":
            return elapsed >= at
        if not seen and happened():
            seen.append(elapsed)
        return bool(seen) and elapsed >= seen[0] + delay

    return now


def _records(run: Path) -> int:
    try:
        return (run / "metrics.jsonl").stat().st_size
    except OSError:
        return 0


def wait(process: subprocess.Popen[bytes], due: Callable[[float], bool] | None) -> int | None:
    """The exit code of a process that ended by itself; None if it was killed."""
    started = time.monotonic()
    while (code := process.poll()) is None:
        elapsed = time.monotonic() - started
        if due is not None and due(elapsed):
            process.kill()
            process.wait()
            return None
        if elapsed > PATIENCE:
            process.kill()
            process.wait()
            return -1
        time.sleep(0.001)
    return code


def one_run(
    supervisor: Supervisor, kills: int, chance: random.Random, seconds: float, phases: Counter[str]
) -> str | None:
    """Kills a run so many times and lets it end; what went wrong, or None."""
    done = 0
    for _ in range(4 * kills + 4):
        due = instants(chance, seconds, supervisor.run, early=done == 0) if done < kills else None
        code = wait(supervisor.start(), due)
        if code is None:
            done += 1
            phases[phase(supervisor.run)] += 1
            continue
        wrong = supervisor.ended(code)
        if wrong is not None:
            return wrong
        if code == 0:
            return None
    return "it never came to its end"


def every_start(folder: Path) -> list[str]:
    """Kills starts before every other of their file operations (tests/run/kill_starts.py); what went wrong."""
    recipe = write_recipe(folder, num_train_epochs=None, max_steps=2, eval_steps=None, eval_on_start=False)
    script = ROOT / "tests" / "run" / "kill_starts.py"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, str(script), str(recipe), "2"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        return [done.stderr[-500:]]
    result = json.loads(done.stdout.splitlines()[-1])
    print(f"{result['kills']} more starts killed before a file operation, in turn")
    return list(result["failures"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", type=int, default=100, help="kills in all")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    chance, phases, failures = random.Random(arguments.seed), Counter[str](), []
    with tempfile.TemporaryDirectory(prefix="kills-") as name:
        folder = Path(name)
        options = {"num_train_epochs": None, "max_steps": STEPS, "save_steps": 2, "logging_steps": 1}
        recipe = write_recipe(folder, eval_steps=10, **options)
        started = time.monotonic()
        whole = Supervisor(recipe, folder / "whole", resume_first=True)
        code = wait(whole.start(), None)
        if code != 0:
            print(whole.errors.read_text())
            return 1
        seconds, expected = time.monotonic() - started, losses(folder / "whole")
        print(f"an unkilled run takes {seconds:.1f} s", flush=True)
        number = 0
        while phases.total() < arguments.count and number < arguments.count:
            supervisor = Supervisor(recipe, folder / f"run-{number}", resume_first=number % 2 == 0)
            kills = min(KILLS_PER_RUN, arguments.count - phases.total())
            wrong = one_run(supervisor, kills, chance, seconds, phases)
            if wrong is None and losses(supervisor.run) != expected:
                wrong = "its losses differ from those of the uninterrupted run"
            if wrong is not None:
                failures.append(f"run {number}: {wrong}")
            shutil.rmtree(supervisor.run, ignore_errors=True)
            number += 1
            print(f"{phases.total()} kills, {number} runs, {len(failures)} failures", flush=True)
        for what, count in sorted(phases.items()):
            print(f"  {count:4} killed in {what}", flush=True)
        (folder / "starts").mkdir()
        failures += every_start(folder / "starts")
        left = [path.name for path in folder.iterdir() if ".starting-" in path.name]
    failures += [f"left lying: {left}"] if left else []
    print("\n".join(failures) or f"all losses of {number} runs are those of the unkilled run, bit by bit")
    return 1 if failures or phases.total() < arguments.count else 0


if __name__ == "__main__":
    raise SystemExit(main())
