"""Compares the operators and kernels that two commits launch on a CUDA GPU, without a GPU.

    make sameness-ptx PARENT=main~3
    python -m tools.sameness.ptx --parent main~3 --only 'call/attention*'
    python -m tools.sameness.ptx --list

Kernels are called through their public functions, and the GPU's recipes are trained, on an emulated device
(`tools/sameness/gpu`). It compares, case by case, the sequences of torch's operators and Triton's launches (grid,
scalars, buffers with their dtypes, shapes and strides), and the PTX that each launched kernel is compiled to for an
H200. Values are not compared: kernels are not run.
"""

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
from importlib.metadata import version
from pathlib import Path

from tools.sameness import trees
from tools.sameness.__main__ import KEPT, sides, world
from tools.sameness.gpu.cases import cases
from tools.sameness.gpu.child import Job
from tools.sameness.gpu.compare import KernelVerdict, Pairs, Verdict, compare_case, compare_kernels
from tools.sameness.gpu.recording import Store


def record(side: trees.Side, names: Sequence[str], scratch: Path, options: argparse.Namespace) -> Store:
    """Record the missing cases of a commit."""
    key = f"{trees.key(side, 'ptx', 1)}-{trees.scripts_hash('gpu/*.py')}-{version('triton')}"
    is_kept = side.commit is not None and options.tree is None  # the tree may change under the same name
    store = Store((KEPT / "launches" if is_kept else scratch) / key)
    store.recover()
    missing, started = store.missing(names), time.monotonic()
    if missing:
        job = Job(
            str(side.tree), missing, str(world().resolve()), str(store.folder.resolve()), options.processes
        )
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(trees.ROOT), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "TRITON_CACHE_DIR": str(scratch / f"triton-{key}"),
            "TRITON_DISABLE_LINE_INFO": "1",
            "CUDA_VISIBLE_DEVICES": "",  # do not use a GPU
        }
        shown = None if options.verbose else subprocess.DEVNULL
        command = [sys.executable, "-P", "-m", "tools.sameness.gpu.child", json.dumps(asdict(job))]
        subprocess.run(command, env=environment, cwd=scratch, stdout=shown, stderr=shown, check=True)
    print(
        f"{side.label[:20]}: {len(missing)} recorded in {time.monotonic() - started:.0f} s, "
        f"{len(names) - len(missing)} known",
        flush=True,
    )
    return store


def run(options: argparse.Namespace, names: Sequence[str]) -> int:
    """Records both sides and prints the tables; 1 if anything differs."""
    started = time.monotonic()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sameness-")))
        parent, head = sides(options, scratch, stack)
        print(
            f"parent {parent.label[:20]}, head {head.label[:20]}, {len(names)} cases; torch {version('torch')}, "
            f"Triton {version('triton')}, sm_90",
            flush=True,
        )
        before, after = (record(side, names, scratch, options) for side in (parent, head))
        pairs: Pairs = {}
        renamed = dict(pair.split("=", 1) for pair in options.renamed)
        verdicts = [compare_case(name, before.read(name), after.read(name), pairs, renamed) for name in names]
        kernels = compare_kernels(pairs, before, after)
        never = after.launchable() - {specialization.place for _, specialization in pairs.values()}
    print(report(verdicts, kernels))
    if never and options.only is None:
        print(f"launched by no case, and not compared: {', '.join(sorted(never))}")
    print(f"{time.monotonic() - started:.0f} s")
    return int(any(one.different for one in verdicts) or any(one.differences for one in kernels))


def report(verdicts: Sequence[Verdict], kernels: Sequence[KernelVerdict]) -> str:
    """Both tables, what differs, and the totals."""
    width = max([len(one.case) for one in verdicts], default=4)
    lines = ["", f"{'case':{width}}  operators  launches  sequence"]
    for one in verdicts:
        note = f"; memory: {one.note}" if one.note else ""
        lines.append(
            f"{one.case:{width}}  {one.operators - one.launches:9}  {one.launches:8}  {one.text}{note}"
        )
        lines += [f"    {line[:400]}" for line in one.diff]
    width = max([len(one.kernel) for one in kernels], default=6)
    lines += ["", f"{'kernel':{width}}  specializations  identical PTX  by parameter name  different"]
    for kernel in kernels:
        lines.append(
            f"{kernel.kernel:{width}}  {kernel.pairs:15}  {kernel.identical:13}  {kernel.by_name:17}  "
            f"{len(kernel.differences):9}  {' '.join(sorted(kernel.added))}"
        )
    for kernel in kernels:
        for what, diff in kernel.differences.items():
            lines += ["", f"DIFFERS {what}", *(f"    {line}" for line in diff)]
    equal = sum(one.text == "equal" for one in verdicts)
    failed = sum(one.failed for one in verdicts)
    launches, operators = sum(one.launches for one in verdicts), sum(one.operators for one in verdicts)
    lines += [
        "",
        f"sequences: {equal} of {len(verdicts)} cases equal, {failed} fail in both; {operators - launches} operators, "
        f"{launches} launches",
        f"PTX: {sum(one.identical for one in kernels)} of {sum(one.pairs for one in kernels)} specializations of "
        f"{len(kernels)} kernels identical, {sum(one.by_name for one in kernels)} by parameter name, "
        f"{sum(len(one.differences) for one in kernels)} different",
    ]
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.sameness.ptx",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--parent",
        help="the commit to compare with; by default HEAD for uncommitted changes, else the merge base",
    )
    add(
        "--renamed",
        metavar="PARENT=HEAD",
        action="append",
        default=[],
        help="a renamed kernel: attention.forward_kernel=attention.attention_forward_kernel; repeatable",
    )
    add("--only", metavar="PATTERN", help="cases whose name matches, or contains it")
    add("--list", action="store_true", help="list the cases and exit")
    add("--processes", type=int, default=2, help="number of recording processes")
    add("--tree", help="without git: the parent's tree, unpacked from `git archive`")
    add("--commit", default="head", help="with --tree: what to call this tree")
    add("--parent-commit", default="parent", help="with --tree: what to call the parent's")
    add("--verbose", action="store_true", help="show each case as it is recorded, and tracebacks of failures")
    return parser.parse_args(arguments)


def main() -> int:
    """Returns the exit code: 1 if anything differs."""
    options = parse()
    names = list(cases(Path(), options.only))
    if not names:
        print(f"error: no case matches {options.only!r}; --list names them", file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(names))
        return 0
    return run(options, names)


if __name__ == "__main__":
    raise SystemExit(main())
