"""`python -m tools.sameness`: records two commits on this machine and compares them case by case."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from tools.sameness import store, trees
from tools.sameness.case import Case
from tools.sameness.child import Job
from tools.sameness.compare import TAKEN_OVER, compare, table
from tools.sameness.sets import DEVICES, cases_of
from tools.sameness.world import write_world

KEPT = trees.ROOT / ".sameness"
"""Recordings, stopped run folders and the inputs (`world`); ignored by git."""
STARTER = trees.ROOT / "trimtab" / "starter" / "base"
ROUNDS = 4
"""Rounds in which processes are started for the missing cases: a process that a case crashed leaves its later cases."""


def world() -> Path:
    """The folder with models and texts, written at first use."""
    return write_world(KEPT / f"world-{trees.scripts_hash('world.py')}", STARTER)


class Recorder:
    """Records the cases of a commit in several concurrent processes."""

    def __init__(self, options: argparse.Namespace, scratch: Path) -> None:
        self.options, self.scratch = options, scratch
        self.world = world()

    def file(self, side: trees.Side) -> Path:
        """The file of a commit's recordings."""
        if self.options.out:
            return Path(self.options.out)
        folder = KEPT / "recordings" if side.commit else self.scratch
        return folder / f"{trees.key(side, self.options.device, self.options.threads)}.jsonl"

    def stopped(self, side: trees.Side) -> Path:
        """The folder of a commit's stopped runs."""
        folder = KEPT / "stopped" if side.commit else self.scratch / "stopped"
        return folder / trees.key(side, self.options.device, self.options.threads)

    def record(
        self, side: trees.Side, names: Sequence[str], stopped: trees.Side
    ) -> dict[str, store.Recording]:
        """Record these cases of a commit; existing recordings are reused."""
        file = self.file(side)
        known = store.read(file, side.label)
        started = time.monotonic()
        for _ in range(ROUNDS):
            found = store.read(file, side.label)
            missing = [name for name in names if name not in found]
            count = min(self.options.processes, len(missing))
            # Neighbouring cases take about as long: deal them out. Rounds begin with other cases.
            children = [self._start(side, missing[i::count], file, stopped) for i in reversed(range(count))]
            for child in children:
                child.wait()
            names = [*names[len(names) // 2 :], *names[: len(names) // 2]]
        found = {name: one for name, one in store.read(file, side.label).items() if name in names}
        new = len(found) - sum(name in known for name in names)
        print(
            f"{side.label[:20]}: {new} recorded in {time.monotonic() - started:.0f} s, {len(found) - new} known"
        )
        return found

    def _start(
        self, side: trees.Side, names: list[str], file: Path, stopped: trees.Side
    ) -> subprocess.Popen[bytes]:
        job = Job(
            tree=str(side.tree),
            commit=side.label,
            device=self.options.device,
            names=names,
            out=str(file.resolve()),
            world=str(self.world.resolve()),
            stopped=str(self.stopped(stopped).resolve()),
            threads=self.options.threads,
        )
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [str(trees.ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
            ),
            "OMP_NUM_THREADS": str(self.options.threads),
            "MKL_NUM_THREADS": str(self.options.threads),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        }
        errors = None if self.options.verbose else subprocess.DEVNULL
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "tools.sameness.child", json.dumps(asdict(job))],
            env=environment,
            cwd=self.scratch,
            stdout=errors,
            stderr=errors,
        )


def sides(options: argparse.Namespace, scratch: Path, stack: ExitStack) -> tuple[trees.Side, trees.Side]:
    """(parent, head): two commits of this repository, or a tree that was unpacked next to this one."""
    if options.tree:
        parent = trees.Side(Path(options.tree).resolve(), options.parent_commit, options.parent_commit)
        return parent, trees.Side(trees.ROOT, options.commit, options.commit)
    head = trees.head_side()
    ref = options.parent or trees.default_parent(head)
    parent = stack.enter_context(trees.parent_side(ref, scratch))
    if parent.commit == head.commit:  # the same commit twice: do not reuse the first recording
        head = trees.Side(head.tree, f"{head.label}+again", None)
    return parent, head


def run(options: argparse.Namespace, cases: list[Case]) -> int:
    """Record both commits and print the table; returns 1 if anything differs."""
    started = time.monotonic()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sameness-")))
        parent, head = sides(options, scratch, stack)
        recorder = Recorder(options, scratch)
        print(
            f"parent {parent.label[:20]}, head {head.label[:20]}, {len(cases)} cases on {options.device}",
            flush=True,
        )
        names = [case.name for case in cases]
        before = recorder.record(parent, names, parent)
        after = recorder.record(head, names, head)
        stopped = [case.name for case in cases if case.stop_at and before.get(case.name)]
        handed = [f"{TAKEN_OVER}{name}" for name in stopped if before[name].error is None]
        # A handover depends on both commits.
        both = trees.Side(head.tree, f"{head.label}<{parent.label}", None)
        taken_over = recorder.record(both, handed, parent)
        verdicts = compare(cases, before, after, taken_over)
    print(table(verdicts))
    different = [one for one in verdicts if one.different]
    failing = [one for one in verdicts if not one.different and one.text != "equal"]
    print(
        f"\n{len(verdicts) - len(different) - len(failing)} of {len(verdicts)} equal bit by bit, {len(different)} "
        f"differ, {len(failing)} fail in both, {time.monotonic() - started:.0f} s"
    )
    for one in different:
        print(f"DIFFERS {one.case}: {one.text}")
    return 1 if different else 0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.sameness", description=__doc__)
    add = parser.add_argument
    add(
        "--parent",
        help="the commit to compare with; by default HEAD for uncommitted changes, else the merge base",
    )
    add("--device", choices=DEVICES, default="cpu")
    add("--only", metavar="PATTERN", help="cases whose name matches, or contains it")
    add("--list", action="store_true", help="list the cases and exit")
    add("--dry", action="store_true", help="validate and plan every recipe, also those for a GPU, and exit")
    add("--processes", type=int, default=2, help="number of recording processes")
    add("--threads", type=int, default=1, help="CPU threads per process")
    add("--tree", help="without git: the parent's tree, unpacked from `git archive`")
    add("--commit", default="head", help="with --tree: what to call this tree")
    add("--parent-commit", default="parent", help="with --tree: what to call the parent's")
    add("--out", metavar="FILE", help="write recordings to this file as JSON lines, and resume from it")
    add("--verbose", action="store_true", help="show each case as it is recorded, and tracebacks of failures")
    return parser.parse_args(arguments)


def main() -> int:
    """Returns the exit code: 1 if anything differs."""
    options = parse()
    cases = cases_of(options.device, options.only)
    if not cases:
        print(f"error: no case matches {options.only!r}; --list names them", file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(case.name for case in cases))
        return 0
    if options.dry:
        from tools.sameness.dry import plan_all

        return plan_all(options.device, cases, world())
    return run(options, cases)


if __name__ == "__main__":
    raise SystemExit(main())
