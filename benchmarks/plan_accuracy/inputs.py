"""Inputs of a case: model folder, documents of random words, recipe. Uses torch only for weights of large models."""

from __future__ import annotations

import fcntl
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.plan_accuracy.cases import CONFIGS, Case
from benchmarks.plan_accuracy.durations import LARGE, num_parameters, steps_of
from trimtab.lab.random_models import config_folder, random_model_folder, write_tokenizer

DOCUMENT_TOKENS = 400
"""Average document length in packed sequences; lengths are exponentially distributed."""
WORDS = 998
"""Number of words of the tokenizer (`write_tokenizer`): w2 to w999."""


def model_folder(root: Path, model: str, device: str) -> tuple[Path, str]:
    """(folder, `model.init`) of a model."""
    config = CONFIGS[model]
    folder = root / "models" / model
    with writing(folder):
        if num_parameters(model) > LARGE:
            return random_model_folder(folder, config, device), "pretrained"
        if not (folder / "tokenizer_config.json").exists():
            config_folder(folder, config)
            write_tokenizer(folder, config["vocab_size"])
        return folder, "random"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Only one process at a time is inside, so that several can share what the first one writes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def documents_file(root: Path, case: Case, sequences: int) -> Path:
    """Write documents for at least `sequences` sequences: one document each, or several if packed."""
    kind = "packed" if case.packed else "whole"
    path = root / "documents" / f"{kind}-{case.tokens}-{sequences}.jsonl"
    with writing(path):
        if not path.exists():
            _write_documents(path, case, sequences)
    return path


def _write_documents(path: Path, case: Case, sequences: int) -> None:
    rng = random.Random(f"{case.tokens} {case.packed}")
    most = min(CONFIGS[case.model]["vocab_size"], WORDS + 2) - 1
    remaining, lines = sequences * case.tokens, []
    while remaining > 0:
        # minus the EOS token that the tokenizer adds to each document
        length = case.tokens - 1
        if case.packed:
            average = min(DOCUMENT_TOKENS, case.tokens / 4)
            length = max(1, min(round(rng.expovariate(1 / average)), case.tokens - 1))
        words = " ".join(f"w{n}" for n in rng.choices(range(2, most), k=length))
        lines.append(json.dumps({"text": words}))
        remaining -= length + 1
    path.write_text("\n".join(lines) + "\n")


def recipe_of(
    case: Case, root: Path, output: Path, device: str, *, model: tuple[Path, str] | None = None
) -> dict[str, Any]:
    """The recipe of a case, with two steps more than measured: one can be profiled, and the run is stopped before it
    saves a checkpoint."""
    folder, init = model or model_folder(root, case.model, device)
    measured = steps_of(case)
    steps = measured.total
    sequences = (steps + 2) * case.rows * int(case.options.get("accumulation", 1))
    return {
        "model": {"name": str(folder), "init": init},
        "data": {
            "train": [{"source": str(documents_file(root, case, sequences + 8))}],
            "cache_dir": str(root / "tokens" / output.name),  # one per case: a process locks it
            "num_proc": 1,
        },
        "output_dir": str(output),
        "max_steps": steps + 2,
        "learning_rate": 1e-5,
        "lr_scheduler_type": "constant",
        "logging_steps": measured.together,
        "save_steps": None,
        "save_total_limit": 1,
        "eval_on_start": False,
        "probe": False,
        "device": device,
        **case.recipe(),
    }
