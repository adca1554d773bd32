"""Kills starts of a run before each of their file operations and restarts them; the parent has torch loaded.

usage: kill_starts.py RECIPE STRIDE
Every STRIDE-th operation is tried, up to the first whole start. Prints one JSON object: kills, and what went wrong.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kill_driver import Silent, supervised

from trimtab import launch
from trimtab.recipe import load

OPERATIONS = ("rename", "replace", "fsync", "unlink", "rmdir", "mkdir")


def fork(work: Callable[[], int]) -> int:
    """The child's exit code; minus the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            code = work()
        finally:
            if code == 99:
                traceback.print_exc()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def start_and_die(recipe: Path, fatal: int) -> int:
    """Starts a run and is killed before its `fatal`-th file operation; 7 if the first step came before that."""
    seen = 0

    def guard(call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*arguments: Any, **options: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return guarded

    for name in OPERATIONS:
        setattr(os, name, guard(getattr(os, name)))
    launch.train(load(recipe), Silent(), after_step=lambda step: os._exit(7))
    return 0


def losses(folder: Path) -> list[tuple[int, str]]:
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(row["step"], float(row["loss"]).hex()) for row in rows if row["kind"] == "train"]


def main(recipe: Path, stride: int) -> dict[str, Any]:
    folder = Path(load(recipe).output_dir)
    assert fork(lambda: supervised(recipe, folder, resume_first=True)) == 0
    expected = losses(folder)
    failures, kills = [], 0
    for fatal in range(1, 1000, stride):
        shutil.rmtree(folder)
        code = fork(lambda fatal=fatal: start_and_die(recipe, fatal))  # type: ignore[misc]
        if code not in (7, -signal.SIGKILL):
            failures.append(f"operation {fatal}: the start ended with {code}")
        kills += code < 0
        again = fork(lambda first=kills % 2 == 0: supervised(recipe, folder, resume_first=first))  # type: ignore[misc]
        if again != 0 or losses(folder) != expected:
            failures.append(f"operation {fatal}: the second start ended with {again}, or with other losses")
        left = [path.name for path in folder.parent.iterdir() if ".starting-" in path.name]
        if left:
            failures.append(f"operation {fatal}: left lying {left}")
        if code == 7:
            break
    return {"kills": kills, "failures": failures}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]))))
