"""Predicted and measured time of the training steps that were recorded on the H200. No torch, no GPU.

    python -m benchmarks.plan_accuracy.recorded

Whole steps are from `results/end-to-end-h200.jsonl` and its repetitions, single operations from the profiles in
`results/step-profiles-h200.txt`. The shipped efficiencies were fitted to some of these profiles
(`benchmarks.shipped_calibration`), so this shows the quality of the fit; the held-out list of
`benchmarks.plan_accuracy` measures the quality of predictions.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.models import MODELS
from trimtab.adapt.spec import LoraSettings
from trimtab.adapt.spec_quantized import Quantization
from trimtab.adapt.spec_recompute import sort_policies
from trimtab.facts.devices import DeviceFacts
from trimtab.model.families import shape_from_config
from trimtab.plan.job import Job
from trimtab.plan.step_time import StepTime, step_time

RESULTS = Path(__file__).parents[1] / "results"
FILES = ("end-to-end-h200.jsonl", "end-to-end-again-h200.jsonl", "build-h200.jsonl")
H200 = DeviceFacts("NVIDIA H200", "cuda", 150 * 10**9, capability=(9, 0), bf16=True)
DOCUMENT_TOKENS = 400
"""Average document length of packed sequences in these records; lengths are exponentially distributed."""
LOGITS = 4 * 2**30
"""Memory limit of the loss, enough for all logits of these jobs."""


@dataclass(frozen=True)
class Recorded:
    """A measured step and its prediction."""

    name: str
    commit: str
    memory: str
    """The recorded recompute policies, MLP tiles and dequantized layers."""
    graphs: bool
    measured: float
    predicted: StepTime

    @property
    def error(self) -> float:
        """Relative error, positive if the prediction is too high."""
        return self.predicted.seconds / self.measured - 1


def recorded_steps() -> Iterator[Recorded]:
    """All recorded trimtab steps with a median time."""
    for file in FILES:
        for line in (RESULTS / file).read_text().splitlines():
            row = json.loads(line)
            if "/trimtab" not in row["name"] or "nearest" in row["name"] or not row.get("median_ms"):
                continue
            case, chosen = row["case"]["job"], row["chosen"]
            job = job_of(
                case["model"], case["method"], case["rows"], case["tokens"], case["packed"], chosen["memory"]
            )
            graphs = bool(chosen["graphs"]["on"])
            predicted = step_time(job, H200, graphs=graphs)
            assert predicted is not None
            name, seconds = row["name"], row["median_ms"] / 1e3
            yield Recorded(name, row["commit"], chosen["memory"], graphs, seconds, predicted)


def job_of(model: str, method: str, rows: int, tokens: int, packed: bool, memory: str) -> Job:
    """The job of a record, with the memory settings parsed from the record's text.

    Example:
        >>> job_of("llama-8b", "qlora", 2, 2048, False, "31 layers offload_half, 1 none").layer_policies[-2:]
        ('offload_half', 'none')
    """
    tiles, unpacked = re.search(r"in (\d+) tiles", memory), re.search(r"weights of (\d+) also", memory)
    share = 1.0
    if packed:  # exponential lengths: the mean of the squared length is twice the squared mean
        share = min(1.0, 2 * DOCUMENT_TOKENS / (tokens + 1))
    qlora = method == "qlora"
    return Job(
        shape_from_config(MODELS[model]),
        batch=rows,
        tokens=tokens,
        accumulation=1,
        dtype="bf16",
        weights_dtype="bf16",
        gradient_dtype="bf16",
        optimizer="adamw_8bit",
        attention="triton" if packed else "sdpa_cudnn",
        device="cuda",
        bf16=True,
        packed=packed,
        policies=sort_policies(_policies(memory)),
        mlp_tiles=int(tiles[1]) if tiles else 1,
        pointwise="triton",
        optimizer_impl="triton",
        loss_impl="triton",
        loss_memory=LOGITS,
        lora=LoraSettings(r=16) if qlora else None,
        quantization=Quantization("nf4", double=True, impl="triton") if qlora else None,
        dequantized_layers=int(unpacked[1]) if unpacked else 0,
        attended_share=share,
    )


def _policies(memory: str) -> dict[str, int]:
    every = re.match(r"(\w+) in all (\d+) layers", memory)
    if every:
        return {every[1]: int(every[2])}
    parts = (re.match(r"\s*(\d+)(?: layers?)? (\w+)", part) for part in memory.split(";")[0].split(","))
    return {found[2]: int(found[1]) for found in parts if found}


def main() -> None:
    """Print predictions and errors of all recorded steps."""
    rows = list(recorded_steps())
    print("# Measured and predicted milliseconds of steps on one NVIDIA H200, with the measured commits.")
    print(
        "# The model's efficiencies were fitted to some of the same profiles: this is no held-out prediction."
    )
    for row in rows:
        print(
            f"{row.name:44}{row.commit:9}{row.measured * 1e3:9.1f}{row.predicted.seconds * 1e3:9.1f}"
            f"{row.error:+8.1%}  {'graph' if row.graphs else 'eager'}  {row.memory}"
        )
    errors = sorted(abs(row.error) for row in rows)
    print(f"{len(rows)} steps: median error {statistics.median(errors):.1%}, worst {errors[-1]:.1%}")


if __name__ == "__main__":
    main()
