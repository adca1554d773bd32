"""Tokens per second of training on a CPU: trimtab and transformers' Trainer, same model and sequences.

    python benchmarks/cpu_training.py --threads 2 --commit $(git rev-parse --short HEAD)

The model is the starter (4.7 million parameters, fp32, torch's fused AdamW, gradient clipping). Each kind has a
process; the processes alternate every few steps, so that other load on the machine affects all of them, and ratios are
taken within a round. `plain` sequences are slices of one token stream without document boundaries, as the Trainer
trains them; `packed` are trimtab's packed sequences with isolated documents. The losses of Trainer and `plain` must
agree, otherwise nothing is written.
Results: benchmarks/results/cpu-training-THREADS.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SEQUENCE = 256
KINDS = ("transformers", "plain", "packed")
LOGGING = 4
LEARNING_RATE = 1e-4
DECAY = 0.01
LOSS_TOLERANCE = 1e-4
MARK = "@@ "


def token_sequences(count: int) -> list[list[int]]:
    """`count` sequences of mathematics, the same for both: concatenated documents, cut every 256 tokens."""
    from trimtab import text
    from trimtab.starter import base_folder, math_documents

    tokenizer = text.load(base_folder())
    stream: list[int] = []
    for document in math_documents(1, 50 * count):
        stream += tokenizer.encode_document(document)
        if len(stream) >= count * SEQUENCE:
            break
    assert len(stream) >= count * SEQUENCE, "too few documents"
    return [stream[i * SEQUENCE : (i + 1) * SEQUENCE] for i in range(count)]


class Turns:
    """Times groups of LOGGING steps, and waits for a line on standard input before each group but the first."""

    def __init__(self) -> None:
        self.steps = 0
        self.begin()

    def begin(self) -> None:
        """Start the clocks."""
        self.wall, self.processor = time.perf_counter(), time.process_time()

    def tick(self) -> None:
        """Count a step; after the last one of a group, print its time and wait."""
        self.steps += 1
        if self.steps % LOGGING == 0:
            took = {
                "wall": time.perf_counter() - self.wall,
                "processor": time.process_time() - self.processor,
            }
            print(MARK + json.dumps(took), flush=True)
            sys.stdin.readline()
            self.begin()


def with_transformers(batch: int, steps: int, turns: Turns, folder: Path) -> list[float]:
    """Train with the Trainer; returns its logged losses, each the mean of LOGGING steps."""
    import torch
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    from trimtab.starter import base_folder

    class Ticks(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            turns.tick()

    class InOrder(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *args: Any, **more: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    model = AutoModelForCausalLM.from_pretrained(base_folder(), dtype=torch.float32)
    rows = [
        {"input_ids": torch.tensor(ids), "labels": torch.tensor(ids)}
        for ids in token_sequences(batch * steps)
    ]
    arguments = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=batch,
        max_steps=steps,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=DECAY,
        optim="adamw_torch_fused",
        logging_steps=LOGGING,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = InOrder(model=model, args=arguments, train_dataset=rows, callbacks=[Ticks()])
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


class PlainSequences:
    """A loader of the Trainer's sequences."""

    def __init__(self, batch: int, steps: int) -> None:
        self.rows, self.batch, self.at = token_sequences(batch * steps), batch, 0

    def next_step(self) -> list[Any]:
        """One microbatch."""
        import numpy as np

        from trimtab.data.batch import collate
        from trimtab.data.packing import Piece

        rows = self.rows[self.at * self.batch : (self.at + 1) * self.batch]
        self.at += 1
        return [collate([[Piece(np.array(ids), "stream")] for ids in rows], SEQUENCE)]

    def position(self) -> dict[str, Any]:
        """The position, for checkpoints."""
        return {"at": self.at}

    def restore(self, position: dict[str, Any]) -> None:
        """Set the position."""
        self.at = position["at"]

    def close(self) -> None:
        """Does nothing."""


def with_trimtab(batch: int, steps: int, turns: Turns, folder: Path, packed: bool) -> list[float]:
    """Train with trimtab; returns losses, each the mean of LOGGING steps."""
    import torch

    from trimtab import text
    from trimtab.parallel import Mesh
    from trimtab.recipe import build
    from trimtab.report import LiveView
    from trimtab.run import RunFolder, build_run
    from trimtab.run.corpora import open_corpora
    from trimtab.run.prepare import prepare
    from trimtab.starter import base_folder

    recipe = build(
        {
            "model": "starter",
            "data": {
                "train": [{"source": "starter:math", "first": 50 * batch * steps}],
                "eval_share": 0.0,
                "cache_dir": str(folder / "cache"),
                "num_proc": 1,
            },
            "max_seq_length": SEQUENCE,
            "packing": packed,
            "per_device_train_batch_size": batch,
            "gradient_accumulation_steps": 1,
            "max_steps": steps,
            "learning_rate": LEARNING_RATE,
            "lr_scheduler_type": "constant",
            "weight_decay": DECAY,
            "dtype": "fp32",
            "device": "cpu",
            "logging_steps": LOGGING,
            "save_steps": None,
            "eval_on_start": False,
            "probe": False,
            "output_dir": str(folder / "run"),
        }
    )
    prepared = prepare(recipe)
    tokenizer = text.load(base_folder())
    run = build_run(
        recipe,
        prepared.resolved,
        prepared.shape,
        Mesh.single(),
        weights=base_folder(),
        tokenizer=tokenizer,
        corpora=open_corpora(recipe, tokenizer, LiveView()),
        folder=RunFolder(Path(recipe.output_dir)),
        on_event=lambda text: None,
    )
    assert torch.get_num_threads() == prepared.resolved.threads
    if not packed:
        run.setup.loader = PlainSequences(batch, steps)
    run.setup.after_step = lambda step: turns.tick()
    run.train()
    lines = run.folder.metrics.read_text().splitlines()
    losses = [record["loss"] for record in map(json.loads, lines) if record["kind"] == "train"]
    return [statistics.fmean(losses[i : i + LOGGING]) for i in range(0, len(losses), LOGGING)]


def work(kind: str, batch: int, num_turns: int, threads: int) -> None:
    """Run one kind in this process, group by group; prints the losses at the end."""
    import torch

    torch.set_num_threads(threads)
    turns = Turns()
    with tempfile.TemporaryDirectory() as name:
        if kind == "transformers":
            losses = with_transformers(batch, num_turns * LOGGING, turns, Path(name))
        else:
            losses = with_trimtab(batch, num_turns * LOGGING, turns, Path(name), kind == "packed")
    print(MARK + json.dumps(losses), flush=True)


class Worker:
    """The process of one kind, as seen by the main process."""

    def __init__(self, kind: str, batch: int, options: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--kind", kind, "--batch", str(batch)]
        command += ["--turns", str(options.turns), "--threads", str(options.threads)]
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True
        )

    def answer(self) -> Any:
        """The next line of results."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                return json.loads(line.removeprefix(MARK))
        self.errors.seek(0)
        raise SystemExit(f"a process failed:\n{self.errors.read()}")

    def go(self) -> None:
        """Start the next group of steps."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


def take_turns(
    batch: int, options: argparse.Namespace
) -> tuple[list[dict[str, Any]], dict[str, list[float]]]:
    """Seconds of each round after the warm-up round, and the losses, by kind."""
    workers: dict[str, Worker] = {}
    for kind in KINDS:  # sequentially: loading and warm-up are not measured
        workers[kind] = Worker(kind, batch, options)
        workers[kind].answer()
    rounds: list[dict[str, Any]] = []
    for number in range(1, options.turns):
        took: dict[str, Any] = {}
        for kind in KINDS if number % 2 else KINDS[::-1]:
            workers[kind].go()
            took[kind] = workers[kind].answer()
        rounds.append(took)
    losses = {}
    for kind, worker in workers.items():
        worker.go()
        losses[kind] = worker.answer()
        worker.process.wait()
    return rounds, losses


def compare(batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """Rates and ratios of one batch size."""
    rounds, losses = take_turns(batch, options)
    ours, theirs = losses["plain"], losses["transformers"]
    difference = max(abs(a - b) / b for a, b in zip(ours, theirs, strict=True))
    if difference > LOSS_TOLERANCE:
        raise SystemExit(f"the losses differ by {difference:.1e}: {ours} and {theirs}")
    tokens = LOGGING * batch * SEQUENCE
    kinds: dict[str, Any] = {}
    for kind in KINDS:
        kinds[kind] = {}
        for clock in ("wall", "processor"):
            rates = [tokens / r[kind][clock] for r in rounds]
            ratios = sorted(r["transformers"][clock] / r[kind][clock] for r in rounds)
            quarter = len(ratios) // 4
            kinds[kind][clock] = {
                "tokens_per_second": round(statistics.median(rates), 1),
                "fastest": round(max(rates), 1),
                "ratio": round(statistics.median(ratios), 3),
                "ratio_quartiles": [round(ratios[quarter], 3), round(ratios[-1 - quarter], 3)],
            }
    return {
        "batch": batch,
        "sequence": SEQUENCE,
        "loss_difference": difference,
        "losses": {"transformers": theirs, "trimtab": ours},
        "kinds": kinds,
    }


def place(options: argparse.Namespace) -> dict[str, Any]:
    """Machine and versions."""
    import torch
    import transformers

    from trimtab.run.device import detect

    return {
        "cpu": detect("cpu").name,
        "threads": options.threads,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def main() -> None:
    """Measure, compare, print and save."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--commit", default="unknown", help="commit to record with the results")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--turns", type=int, default=9, help=f"rounds of {LOGGING} steps; the first is warm-up"
    )
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, help="one batch size only")
    options = parser.parse_args()
    if options.kind:
        work(options.kind, options.batch, options.turns, options.threads)
        return
    results = [compare(batch, options) for batch in ([options.batch] if options.batch else [4, 16])]
    print(f"{'batch':8} {'':15} {'tokens/s':>9} {'ratio':>7} {'(quartiles)':>13} {'by CPU time':>18}")
    for result in results:
        for kind, entry in result["kinds"].items():
            low, high = entry["wall"]["ratio_quartiles"]
            name = kind if kind == "transformers" else f"trimtab {kind}"
            print(
                f"{result['batch']:>2}×{SEQUENCE:<5} {name:15} {entry['wall']['tokens_per_second']:9.0f} "
                f"{entry['wall']['ratio']:7.2f} {f'({low:.2f}–{high:.2f})':>13} {entry['processor']['ratio']:18.2f}"
            )
    report = {
        "version": 1,
        "commit": options.commit,
        "place": place(options),
        "steps_per_turn": LOGGING,
        "measured_turns": options.turns - 1,
        "results": results,
    }
    out = Path(__file__).with_name("results") / f"cpu-training-{options.threads}.json"
    out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
