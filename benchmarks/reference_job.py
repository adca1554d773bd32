"""Runs the reference job on one GPU: memory, time, and the loss difference caused by bf16 gradients.

    python -m benchmarks.reference_job --work work --commit $(git rev-parse --short HEAD)

`recipes/qwen3-0.6b-math.yaml` unchanged, with replacements for files of the hub: random weights of
Qwen3-0.6B's shape with the starter's tokenizer, 10,000 generated documents, the starter's general text. One
process per case, one line of JSON per finished case in benchmarks/results/reference-job.jsonl; a second call
resumes an interrupted run. The cases:

    job                   the full recipe, with evaluation and checkpoints
    gradients-FORMAT-N    the first steps with `gradient_dtype: FORMAT` and seed N
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.models import MODELS
from trimtab.lab.records import append_record, provenance, read_records

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "recipes" / "qwen3-0.6b-math.yaml"
RESULTS = Path(__file__).with_name("results") / "reference-job.jsonl"
DOCUMENTS = 10_000
REFERENCE = {
    "before_gb": 3.7,
    "peak_gb": 6.8,
    "device": "A10G",
    "source": "the published notebook's own readings",
}


def cases(seeds: int) -> list[str]:
    """The names of the cases, in order."""
    return ["job", *(f"gradients-{kind}-{seed}" for seed in range(1, seeds + 1) for kind in ("fp32", "bf16"))]


def prepare(work: Path) -> None:
    """Write the model folder and the documents, unless they exist."""
    from tools.starter.stories import general_documents
    from trimtab.starter import base_folder, math_documents

    model, documents = work / "model", work / "documents.jsonl"
    if not (model / "model.safetensors").exists():
        from trimtab.model import build, init_weights, save_folder
        from trimtab.model.families import shape_from_config

        decoder = build(
            shape_from_config(MODELS["qwen3-0.6b"]), dtype="bf16", device="cuda", attention="reference"
        )
        save_folder(init_weights(decoder, 0), model, dtype="bf16", config_extra={"eos_token_id": 0})
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (model / name).write_bytes((base_folder() / name).read_bytes())
    if not documents.exists():
        with documents.open("w", encoding="utf-8") as file:
            stories, solved = general_documents(1, DOCUMENTS), math_documents(1, DOCUMENTS)
            for story, solution in zip(stories, solved, strict=True):
                file.write(json.dumps({"text": f"{story}\n\n{solution}"}) + "\n")


def overrides(case: str, work: Path, steps: int) -> list[str]:
    """The recipe keys that a case changes."""
    changes = [
        f"model.name={work / 'model'}",
        f'data.train=[{{"source": "{work / "documents.jsonl"}"}}]',
        'data.eval={"general": ["starter:general"]}',
        f"data.cache_dir={work / 'cache'}",
        f"output_dir={work / 'runs' / case}",
    ]
    if case != "job":
        _, gradients, seed = case.split("-")
        changes += [f"gradient_dtype={gradients}", f"seed={seed}", f"max_steps={steps}", "save_steps=null"]
        changes += ["eval_steps=null", "answers=0", "prompts=[]", "probe=false"]
    return changes


def run_case(case: str, work: Path, steps: int) -> dict[str, Any]:
    """Train one case in this process; returns figures from its log and the allocator."""
    import torch

    from trimtab import launch
    from trimtab.recipe import load
    from trimtab.report import LiveView

    recipe = load(RECIPE, overrides(case, work, steps))
    begun = time.perf_counter()
    with LiveView() as view:
        finished = launch.train(recipe, view)
    wall = time.perf_counter() - begun
    records = [json.loads(line) for line in (finished.folder / "metrics.jsonl").read_text().splitlines()]
    train = [r for r in records if r["kind"] == "train"]
    half = train[len(train) // 2 :]
    return {
        "case": case,
        "steps": len(train),
        "wall_seconds": round(wall, 1),
        "step_ms": round(1e3 * (half[-1]["seconds"] - half[0]["seconds"]) / max(len(half) - 1, 1), 1),
        "tokens_per_second": half[-1]["tokens_per_second"],
        "allocator_peak_bytes": torch.cuda.max_memory_allocated(),
        "reserved_peak_bytes": torch.cuda.max_memory_reserved(),
        "plan": json.loads((finished.folder / "plan.json").read_text()).get("memory"),
        "choices": json.loads((finished.folder / "choices.json").read_text()),
        "memory": [r for r in records if r["kind"] == "memory"],
        "evaluations": [r for r in records if r["kind"] == "eval"],
        "losses": [round(r["loss"], 6) for r in train],
        "reference": REFERENCE if case == "job" else None,
    }


def main() -> int:
    """Run the missing cases in processes and record them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--work", type=Path, default=Path("work"), help="folder for model, data and runs")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the lines of results")
    parser.add_argument("--commit", default="unknown", help="commit to record with the results")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60, help="steps of the cases that compare gradients")
    parser.add_argument(
        "--together",
        type=int,
        default=1,
        help="gradient cases that run concurrently; their times are then not meaningful",
    )
    parser.add_argument("--case", help="run this one in this process (used by the script itself)")
    options = parser.parse_args()
    work = options.work.resolve()
    if options.case:
        row = run_case(options.case, work, options.steps)
        row |= {**provenance("cuda", commit=options.commit), "alone": options.together == 1}
        append_record(options.out, row)
        return 0
    work.mkdir(parents=True, exist_ok=True)
    prepare(work)
    done = read_records(options.out, "case")
    missing = [case for case in cases(options.seeds) if case not in done]

    def run(case: str) -> bool:
        print(f"== {case}", flush=True)
        command = [
            sys.executable,
            "-m",
            "benchmarks.reference_job",
            "--case",
            case,
            "--work",
            str(work),
            "--out",
            str(options.out),
        ]
        command += ["--commit", options.commit, "--steps", str(options.steps)]
        command += ["--together", str(1 if case == "job" else options.together)]
        return subprocess.run(command).returncode == 0

    ended = [run("job")] if "job" in missing else []
    with ThreadPoolExecutor(options.together) as pool:
        ended += pool.map(run, [case for case in missing if case != "job"])
    return 0 if all(ended) else 1


if __name__ == "__main__":
    raise SystemExit(main())
