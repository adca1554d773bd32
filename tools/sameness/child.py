"""A process that records cases with the trimtab of one tree. Started by `__main__`; arguments come as JSON.

The recording code is always that of the head; only `trimtab` comes from the tree.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from tools.sameness import actions, recording, store  # noqa: F401  (before the tree's own `tools` can be found)
from tools.sameness.case import Case
from tools.sameness.compare import TAKEN_OVER
from tools.sameness.sets import base_of, cases_of


@dataclass(frozen=True)
class Job:
    """The cases that a process records."""

    tree: str
    commit: str
    device: str
    names: list[str]
    """Cases; with `handover/` in front those whose stopped folder is in `stopped`."""
    out: str
    world: str
    stopped: str
    """Folder with the stopped run folders: written to for plain cases, read from for handovers."""
    threads: int


def main() -> None:
    """Record every case of the job in the first argument."""
    job = Job(**json.loads(sys.argv[1]))
    sys.path.insert(0, job.tree)
    import trimtab

    found = Path(trimtab.__file__).resolve()
    assert found.is_relative_to(Path(job.tree).resolve()), f"{found} is not in {job.tree}"
    import torch

    cases = {case.name: case for case in cases_of(job.device)}
    for name in job.names:
        torch.set_num_threads(job.threads)
        torch.manual_seed(0)
        done = record(job, name, cases[name.removeprefix(TAKEN_OVER)])
        store.append(Path(job.out), done)
        print(f"{job.commit[:12]} {name} {done.seconds:.1f} s{' FAILED' if done.error else ''}", flush=True)
        if done.error is not None and "CUDA error" in done.error:
            raise SystemExit(3)  # CUDA is unusable after it: another process records the remaining cases


def record(job: Job, name: str, case: Case) -> store.Recording:
    """One case, in a folder that is removed afterwards."""
    started = time.monotonic()
    world, work = Path(job.world), Path(tempfile.mkdtemp(prefix="sameness-"))
    runner = actions.Runner(case, case.recipe(base_of(job.device), world), world, work)
    stopped = Path(job.stopped) / case.name
    error = None
    try:
        if name.startswith(TAKEN_OVER):
            runner.take_over(stopped)
        else:
            runner.train(stopped)
    except Exception as failure:  # noqa: BLE001  (a case that fails is a result, compared like any other)
        error = f"{type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''}"
        error = error.replace(str(work), "WORK")[:300]
        print(traceback.format_exc(), file=sys.stderr, flush=True)
    choices = _choices(runner.run)
    shutil.rmtree(work, ignore_errors=True)
    return store.Recording(
        name, job.commit, runner.values, error, round(time.monotonic() - started, 2), choices
    )


def _choices(run: Path) -> dict[str, str]:
    """The implementations that a run used, from its choices.json."""
    file = run / "choices.json"
    if not file.is_file():
        return {}
    kept = json.loads(file.read_text())
    parts = ("attention", "loss", "pointwise", "optimizer", "quantization", "compile", "graphs")
    named = {part: kept.get(part) or {} for part in parts}
    found = {part: str(one.get("impl", one.get("on", ""))) for part, one in named.items()}
    return {part: text for part, text in found.items() if text}


if __name__ == "__main__":
    main()
