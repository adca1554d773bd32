"""Runs a recipe over and over in forked children and kills them at random instants; the parent has torch loaded.

usage: kill_driver.py RECIPE KILLS SEED SIGNAL
Prints one JSON object: how many children were killed, in what state, and how long the last one took.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import trimtab.checkpoint.store
import trimtab.run.lifecycle  # noqa: F401  (lazy otherwise: torch is to be imported once, before any fork)
from trimtab import launch
from trimtab.facts.errors import CheckpointError
from trimtab.recipe import load


class Silent:
    """A view that shows nothing."""

    total_steps = 0

    def plan(self, plan: object) -> None: ...
    def message(self, text: str) -> None:
        with open(os.environ.get("KILL_LOG", os.devnull), "a") as file:
            file.write(text + "\n")

    def progress(self, what: str, done: int, total: int | None, unit: str = "") -> None: ...
    def record(self, record: object) -> None: ...


def supervised(recipe: Path, folder: Path, *, resume_first: bool) -> int:
    """Starts or resumes a run as supervisors do; neither may ever raise.

    With `resume_first` whatever folder exists is resumed, otherwise the recipe is started unless that is refused
    because the folder holds a run.
    """
    if resume_first and folder.exists():
        finished = launch.resume(folder, [], Silent())
    else:
        try:
            finished = launch.train(load(recipe), Silent())
        except CheckpointError as error:
            if "already contains a run" not in str(error):
                raise
            finished = launch.resume(folder, [], Silent())
    return 0 if finished.status == "finished" else 3


def main() -> None:
    recipe, kills, number = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[4])
    rng = random.Random(int(sys.argv[3]))
    killed = during_save = graceful = 0
    folder = Path(load(recipe).output_dir)
    for attempt in range(400):
        started = time.monotonic()
        pid = os.fork()
        if pid == 0:
            code = 99
            try:
                code = supervised(recipe, folder, resume_first=attempt % 3 > 0)
            finally:  # a forked child must not return into this loop
                if code == 99:
                    traceback.print_exc()
                os._exit(code)
        if killed + graceful < kills:
            time.sleep(rng.uniform(0.05, float(os.environ.get("KILL_WITHIN", "1.2"))))
            os.kill(pid, number)
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            killed += 1
            during_save += any(p.name.startswith(".tmp-") for p in (folder / "checkpoints").glob(".tmp-*"))
        elif os.WEXITSTATUS(status) == 3:
            graceful += 1
        elif os.WEXITSTATUS(status) == 0:
            break
        else:
            raise SystemExit(f"a child failed with code {os.WEXITSTATUS(status)}")
    seconds = time.monotonic() - started
    print(
        json.dumps({"killed": killed, "during_save": during_save, "graceful": graceful, "seconds": seconds})
    )


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    main()
