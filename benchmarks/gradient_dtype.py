"""What keeping gradients in bf16 instead of fp32 costs in loss, over several seeds.

    python benchmarks/gradient_dtype.py --commit $(git rev-parse --short HEAD)

The embedded starter model learns mathematics with bf16 weights, `adamw_8bit` and 4 × 4 accumulation, once with
`gradient_dtype: fp32` and once with `bf16`, everything else equal: the same seed draws the same windows and the
same rounding. Compared is the loss on held-out mathematics. Results: benchmarks/results/gradient-dtype.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
from pathlib import Path
from typing import Any

FORMATS = ("fp32", "bf16")


def train(gradients: str, seed: int, steps: int, folder: Path) -> dict[str, float]:
    """One run; held-out loss before and after."""
    from rich.console import Console

    from trimtab import launch
    from trimtab.recipe import build
    from trimtab.report import LiveView

    recipe = build(
        {
            "model": "starter",
            "data": {
                "train": [{"source": "starter:math", "first": 4000}],
                "eval": {"domain": ["starter:math-heldout"]},
                "eval_windows": 48,
                "cache_dir": str(folder / "cache"),
                "num_proc": 1,
            },
            "max_seq_length": 128,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 4,
            "max_steps": steps,
            "learning_rate": 5e-4,
            "lr_scheduler_type": "cosine",
            "optim": "adamw_8bit",
            "dtype": "bf16",
            "gradient_dtype": gradients,
            "device": "cpu",
            "save_steps": None,
            "probe": False,
            "seed": seed,
            "output_dir": str(folder / f"{gradients}-{seed}"),
        }
    )
    with LiveView(console=Console(quiet=True)) as view:
        finished = launch.train(recipe, view)
    lines = map(json.loads, (finished.folder / "metrics.jsonl").read_text().splitlines())
    losses = [record["loss"] for record in lines if record["kind"] == "eval"]
    return {"before": losses[0], "after": losses[-1]}


def main() -> None:
    """Train, compare, print, keep."""
    import torch

    from trimtab.run.device import detect

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--commit", default="unknown", help="commit to record beside the numbers")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    print(f"{'seed':>4} {'before':>8} {'fp32':>8} {'bf16':>8} {'difference':>11}")
    with tempfile.TemporaryDirectory() as name:
        for seed in range(1, options.seeds + 1):
            found = {kind: train(kind, seed, options.steps, Path(name)) for kind in FORMATS}
            after = {kind: found[kind]["after"] for kind in FORMATS}
            row = {"seed": seed, "before": found["fp32"]["before"], **after}
            rows.append({**row, "difference": after["bf16"] - after["fp32"]})
            print(
                " ".join(f"{v:8.4f}" if isinstance(v, float) else f"{v:4}" for v in rows[-1].values()),
                flush=True,
            )
    differences = [row["difference"] for row in rows]
    between_seeds = statistics.stdev(row["fp32"] for row in rows) if len(rows) > 1 else None
    summary = {
        "mean_difference": statistics.fmean(differences),
        "smallest_difference": min(differences),
        "largest_difference": max(differences),
        "spread_between_seeds": between_seeds,
    }
    print(
        f"bf16 − fp32: {summary['mean_difference']:+.4f} ({min(differences):+.4f} to {max(differences):+.4f})"
    )
    place = {"cpu": detect("cpu").name, "torch": torch.__version__, "python": platform.python_version()}
    report = {
        "version": 1,
        "commit": options.commit,
        "place": place,
        "steps": options.steps,
        "batch": "4 × 4 windows of 128 tokens",
        "rows": rows,
        "summary": summary,
    }
    out = Path(__file__).with_name("results") / "gradient-dtype.json"
    out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
