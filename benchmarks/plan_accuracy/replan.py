"""Predictions of the current code for recorded cases, without a GPU and without their weights.

    python -m benchmarks.plan_accuracy.replan results/plan-accuracy-development-nvidia-h200.jsonl [--calibrated]

The predictions replace the recorded ones, so that a change of the planner's model can be judged on the development
list. `--calibrated` plans with the recorded calibration; otherwise with what ships with the package.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.plan_accuracy import inputs, table
from benchmarks.plan_accuracy.cases import CONFIGS, Case
from benchmarks.plan_accuracy.readings import predicted
from trimtab.facts.calibration import Calibration
from trimtab.facts.devices import DeviceFacts
from trimtab.lab.random_models import config_folder, write_tokenizer
from trimtab.lab.records import read_records
from trimtab.plan.job import Job
from trimtab.plan.step_time import step_time
from trimtab.recipe import build
from trimtab.run.prepare import Prepared, prepare

H200 = DeviceFacts(
    "NVIDIA H200", "cuda", 150_109_880_320, free_bytes=149 * 10**9, capability=(9, 0), bf16=True, cores=16,
    host_free_bytes=120 * 2**30,
)  # fmt: skip
"""The measured machine, without a calibration."""


def prepare_case(case: Case, root: Path, device: DeviceFacts = H200) -> Prepared:
    """Prepares a case for a device that is not present; writes its config and documents, but no weights."""
    folder = root / "models" / case.model
    if not folder.exists():
        config_folder(folder, CONFIGS[case.model])
        write_tokenizer(folder, CONFIGS[case.model]["vocab_size"])
    recipe = inputs.recipe_of(case, root, root / "run", device.kind, model=(folder, "random"))
    return prepare(build(recipe), device=device)


def job_of(case: Case, prepared: Prepared, root: Path) -> Job:
    """The planned job, with the share of attention within the documents of packed sequences."""
    job = prepared.plan.job
    return job.changed(attended_share=attended_share(case, root)) if case.packed else job


def attended_share(case: Case, root: Path) -> float:
    """The share of a causal sequence's query–key pairs that are within one of its documents."""
    lines = inputs.documents_file(root, case, 200).read_text(encoding="utf-8").splitlines()
    lengths = [len(json.loads(line)["text"].split()) + 1 for line in lines]
    return min(1.0, sum(n * (n + 1) for n in lengths) / sum(lengths) / (case.tokens + 1))


def replanned(
    records: dict[str, dict[str, Any]], root: Path, device: DeviceFacts
) -> Iterator[dict[str, Any]]:
    """The records with the predictions of the current code for the device."""
    for name, record in records.items():
        if "failed" in record:
            continue
        case = Case.parse(name)
        prepared = prepare_case(case, root, device)
        told = predicted(json.loads(json.dumps(prepared.plan.to_dict())))
        step = step_time(job_of(case, prepared, root), device, graphs=prepared.resolved.graphs.enabled)
        assert step is not None
        reserved = prepared.plan.reserved
        assert reserved is not None
        told |= {"reserved": reserved.reserved, "process": reserved.process}
        told |= {"step_seconds": step.seconds, "by_kind": step.by_kind(), "host_seconds": step.host_seconds}
        yield {**record, "predicted": told}


def main() -> int:
    """Prints the tables of errors."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan_accuracy.replan")
    parser.add_argument("file", type=Path)
    parser.add_argument("--calibrated", action="store_true")
    parser.add_argument("--commit")
    options = parser.parse_args()
    device = H200
    if options.calibrated:
        calibrations = list(read_records(options.file, "calibration_of").values())
        device = dataclasses.replace(H200, calibration=Calibration.from_dict(calibrations[-1]["calibration"]))
    with tempfile.TemporaryDirectory() as root:
        found = list(replanned(table.read(options.file, options.commit), Path(root), device))
    print(table.markdown({record["case"]: record for record in found}), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
