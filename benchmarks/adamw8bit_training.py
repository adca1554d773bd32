"""Training with 8-bit moments beside fp32 ones: the starter model, the demo's recipe, several seeds.

    python -m benchmarks.adamw8bit_training --commit $(git rev-parse --short HEAD)

For each seed the recipe of `trimtab demo` is trained twice, with `adamw_torch` (fp32 moments) and `adamw_8bit`,
everything else equal: the same seed draws the same windows. Compared are training loss, held-out calculus
(what is learnt) and held-out general text (what is forgotten). A run that was cut short goes on where it
ended: each finished training is kept at once in benchmarks/results/adamw8bit-training.json. At the end the
curves are drawn into docs/adamw8bit-training.svg. On one core about a minute a training, six in all.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.curves import chart, smooth

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "adamw8bit-training.json"
PICTURE = ROOT / "docs" / "adamw8bit-training.svg"
OPTIMIZERS = {"adamw_torch": "#1f6feb", "adamw_8bit": "#d9480f"}
LABELS = {"adamw_torch": "fp32 moments", "adamw_8bit": "8-bit moments"}


def train(optimizer: str, seed: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One training: loss of every step, and of the held-out sets at each measurement."""
    from rich.console import Console

    from trimtab import launch
    from trimtab.recipe import load
    from trimtab.report import LiveView
    from trimtab.starter import recipe_file

    changes = {
        "num_train_epochs": "null",
        "max_steps": options.steps,
        "optim": optimizer,
        "seed": seed,
        "eval_steps": max(1, options.steps // 3),
        "save_steps": "null",
        "probe": "false",
        "answers": 0,
        "prompts": "[]",
        "device": options.device,
        "data.cache_dir": folder / "cache",
        "data.num_proc": 1,
        "output_dir": folder / f"{optimizer}-{seed}",
    }
    if optimizer == "adamw_8bit":
        changes["optim_implementation"] = options.implementation
    recipe = load(recipe_file("demo"), [f"{key}={value}" for key, value in changes.items()])
    with LiveView(console=Console(quiet=True)) as view:
        finished = launch.train(recipe, view)
    lines = [json.loads(line) for line in (finished.folder / "metrics.jsonl").read_text().splitlines()]
    row: dict[str, Any] = {"optimizer": optimizer, "seed": seed}
    row["train"] = [round(r["loss"], 5) for r in lines if r["kind"] == "train"]
    for name in ("domain", "general"):
        row[name] = [
            [r["step"], round(r["loss"], 5)] for r in lines if r["kind"] == "eval" and r["name"] == name
        ]
    return row


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The last held-out losses, their difference seed by seed, and how far seeds lie apart."""
    found: dict[str, Any] = {}
    for name in ("domain", "general"):
        last = {(r["optimizer"], r["seed"]): r[name][-1][1] for r in rows}
        seeds = sorted({seed for _, seed in last})
        gaps = [last["adamw_8bit", s] - last["adamw_torch", s] for s in seeds]
        fp32 = [last["adamw_torch", s] for s in seeds]
        found[name] = {
            "fp32": statistics.fmean(fp32),
            "8bit": statistics.fmean(last["adamw_8bit", s] for s in seeds),
            "gap_mean": statistics.fmean(gaps),
            "gap_worst": max(gaps, key=abs),
            "spread_between_seeds": statistics.stdev(fp32) if len(fp32) > 1 else None,
        }
    return found


def picture(rows: list[dict[str, Any]]) -> str:
    """SVG: training loss over steps on the left, the gap seed by seed on the right."""
    left = {k: [smooth(r["train"]) for r in rows if r["optimizer"] == k] for k in OPTIMIZERS}
    pairs = zip(left["adamw_torch"], left["adamw_8bit"], strict=True)
    gaps = [[[s, b - a] for (s, a), (_, b) in zip(x, y, strict=True)] for x, y in pairs]
    lines = [(OPTIMIZERS[k], curve) for k in OPTIMIZERS for curve in left[k]]
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 300" font-family="sans-serif" font-size="12">',
        '<rect width="860" height="300" fill="white"/>',
        *chart(50, "training loss, mean of 20 steps, each line a seed", lines),
        *chart(480, "8-bit minus fp32, same seed", [(OPTIMIZERS["adamw_8bit"], gap) for gap in gaps]),
    ]
    for i, (key, colour) in enumerate(OPTIMIZERS.items()):
        parts.append(f'<text x="260" y="{60 + 18 * i}" fill="{colour}">{LABELS[key]}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    """Train what is missing, compare, print, keep, draw."""
    import torch

    from trimtab.run.device import detect

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--commit", default="unknown", help="commit to record beside the numbers")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--implementation", default="auto", help="optim_implementation of adamw_8bit")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    place = {
        "device": detect(options.device).name,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    settings = {"steps": options.steps, "recipe": "demo.yaml", "implementation": options.implementation}
    report: dict[str, Any] = {"version": 1, "commit": options.commit, "place": place, "settings": settings}
    rows: list[dict[str, Any]] = []
    if options.out.exists():
        before = json.loads(options.out.read_text())
        rows = before["rows"] if (before["settings"], before["place"]) == (settings, place) else []
    with tempfile.TemporaryDirectory() as name:
        for seed in range(1, options.seeds + 1):
            for optimizer in OPTIMIZERS:
                if any((r["optimizer"], r["seed"]) == (optimizer, seed) for r in rows):
                    continue
                rows.append(train(optimizer, seed, options, Path(name)))
                options.out.write_text(json.dumps({**report, "rows": rows}) + "\n")
                print(optimizer, seed, rows[-1]["domain"][-1], rows[-1]["general"][-1], flush=True)
    report |= {"summary": summary(rows), "rows": rows}
    options.out.write_text(json.dumps(report) + "\n")
    print(json.dumps(report["summary"], indent=1))
    if options.out == RESULT:
        PICTURE.write_text(picture(rows))


if __name__ == "__main__":
    main()
