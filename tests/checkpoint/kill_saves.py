"""Forks savers and kills them; run by test_checkpoint_faults.py in a separate process.

Forking after torch is imported makes a kill cost milliseconds instead of an import.

    python kill_saves.py random FOLDER COUNT    kill −9 at random instants of a tight save loop
    python kill_saves.py every FOLDER           kill −9 before each file operation of one save, in turn
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystem

from trimtab.checkpoint import Store


def state_of(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "model.weight": torch.randn(100, 50, generator=generator),
        "codes": torch.randint(0, 256, (5000,), generator=generator, dtype=torch.uint8),
        "count": torch.tensor(step),
    }


def quiet(_: str) -> None:
    pass


def save_forever(folder: Path, first: int) -> None:
    store = Store(folder, keep_last=2, on_event=quiet, file_bytes=8000)
    for step in range(first, first + 100_000):
        store.save(step, state_of(step), {"step": step}, tags={"best"} if step % 3 == 0 else ())


def check(folder: Path) -> tuple[int, str | None]:
    """The step of the latest checkpoint (0: none), and what is wrong with it or the folder, if anything."""
    said: list[str] = []
    store = Store(folder, on_event=said.append)
    found = store.latest()
    damaged = [message for message in said if "damaged" in message]
    if damaged:
        return 0, damaged[0]
    if found is None:
        return 0, None
    for tagged in (found, store.best()):
        if tagged is None:
            continue
        target = {name: torch.zeros_like(tensor) for name, tensor in state_of(0).items()}
        scalars = store.load(tagged, target)
        if scalars != {"step": tagged.step} or tagged.path.name != f"step-{tagged.step:08d}":
            return found.step, f"{tagged} holds the scalars {scalars}"
        for name, tensor in state_of(tagged.step).items():
            if not torch.equal(target[name], tensor):
                return found.step, f"{tagged}: {name} is another step's"
    if (folder / "latest").read_text().strip() != found.path.name:
        return found.step, "the pointer names another one"
    if hidden := [path.name for path in folder.iterdir() if path.name.startswith((".tmp", ".replaced"))]:
        return found.step, f"left lying: {hidden}"
    return found.step, None


def fork(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


def kill_randomly(folder: Path, count: int) -> dict[str, Any]:
    chance = random.Random(0)
    failures, unfinished, step = [], 0, 0
    for kill in range(count):
        first = step + 1
        pid = fork(lambda first=first: save_forever(folder, first))  # type: ignore[misc]
        time.sleep(chance.uniform(0.01, 0.35))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        if folder.exists():
            unfinished += any(path.name.startswith(".tmp") for path in folder.iterdir())
        after, wrong = check(folder)
        if wrong is None and after < step:
            wrong = f"step {step} was good before and is gone, {after} is left"
        if wrong is not None:
            failures.append(f"kill {kill}: {wrong}")
        step = max(step, after)
    return {"kills": count, "failures": failures, "unfinished": unfinished, "last_step": step}


def save_and_die(folder: Path, step: int, fatal: int) -> None:
    """Saves once; the process is killed before its `fatal`-th operation that changes the disk."""
    seen = 0

    def guard(call: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*arguments: Any, **options: Any) -> Any:
            nonlocal seen
            seen += 1
            if seen == fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)

        return guarded

    for owner, names in [
        (os, ("rename", "replace", "fsync", "unlink", "rmdir", "mkdir")),
        (shutil, ("rmtree",)),
        (FileSystem, ("create_stream",)),
    ]:
        for name in names:
            setattr(owner, name, guard(getattr(owner, name)))
    store = Store(folder, keep_last=1, on_event=quiet, file_bytes=8000)
    store.save(step, state_of(step), {"step": step}, tags={"best"}, wait=True)


def kill_everywhere(folder: Path) -> dict[str, Any]:
    """A new step that also prunes, and a step saved a second time, each killed at every operation."""
    failures, kills = [], 0
    for step in (3, 2):
        for fatal in range(1, 200):
            shutil.rmtree(folder, ignore_errors=True)
            with Store(folder, keep_last=None, on_event=quiet) as store:
                for earlier in (1, 2):
                    store.save(earlier, state_of(earlier), {"step": earlier})
            pid = fork(lambda step=step, fatal=fatal: save_and_die(folder, step, fatal))  # type: ignore[misc]
            _, status = os.waitpid(pid, 0)
            after, wrong = check(folder)
            if wrong is None and after not in (2, step):
                wrong = f"step {after} is the latest"
            if wrong is not None:
                failures.append(f"step {step}, operation {fatal}: {wrong}")
            if not os.WIFSIGNALED(status):
                if after != step:
                    failures.append(f"step {step} was not saved although nothing was killed")
                break
            kills += 1
        else:
            failures.append("never ran to the end")
    return {"kills": kills, "failures": failures}


if __name__ == "__main__":
    mode, place = sys.argv[1], Path(sys.argv[2]) / "checkpoints"
    result = kill_randomly(place, int(sys.argv[3])) if mode == "random" else kill_everywhere(place)
    print(json.dumps(result))
