"""Complete runs on a GPU: killed and resumed bit-identically, unpacked sequences, fp16."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from run_kill import drive, losses
from tiny_model import write_recipe
from whole_run import losses as curve_of
from whole_run import relative, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

EXACT = {
    "device": "cuda",
    "dtype": "bf16",
    "optim": "adamw_8bit",
    "deterministic": True,
    "prompts": ["the cat", "a big dog"],
    "answers": 2,
    "eval_steps": 10,
    "save_steps": 1,
}


def texts(folder: Path) -> list[str]:
    """Completions and answers from the log."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [
        json.dumps(row, sort_keys=True)
        for row in rows
        if row["kind"] not in ("train", "eval", "memory", "compile", "event")
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    drive(write_recipe(folder, **EXACT), 0, 0, signal.SIGKILL, 1.0)
    return folder


@pytest.fixture(scope="module")
def seconds(whole: Path) -> float:
    """Seconds of a second run, whose kernels are in Triton's cache."""
    recipe = write_recipe(whole, **EXACT, output_dir=str(whole / "again"))
    return drive(recipe, 0, 0, signal.SIGKILL, 1.0)["seconds"]


MOST = 0.75
"""Signals come within this share of the time of a whole run, so that the first attempts never finish."""


@pytest.mark.alone
def test_a_second_run_repeats_the_first(whole: Path, seconds: float) -> None:
    assert losses(whole / "again") == losses(whole / "run")
    assert texts(whole / "again") == texts(whole / "run")


@pytest.mark.alone
def test_killed_at_random_instants(whole: Path, seconds: float, tmp_path: Path) -> None:
    recipe = write_recipe(whole, **EXACT, output_dir=str(tmp_path / "run"))
    result = drive(recipe, 6, 1, signal.SIGKILL, MOST * seconds)
    assert result["killed"] >= 2
    assert losses(tmp_path / "run") == losses(whole / "run")
    assert texts(tmp_path / "run") == texts(whole / "run")


@pytest.mark.alone
def test_terminated(whole: Path, seconds: float, tmp_path: Path) -> None:
    recipe = write_recipe(whole, **EXACT, output_dir=str(tmp_path / "run"))
    result = drive(recipe, 2, 2, signal.SIGTERM, MOST * seconds)
    assert result["graceful"] + result["killed"] >= 1
    assert losses(tmp_path / "run") == losses(whole / "run")


@pytest.fixture(scope="module")
def on_the_cpu(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], list[float]]:
    """The loss curve in fp32 on the CPU, packed or not."""
    folder = tmp_path_factory.mktemp("cpu")
    found: dict[bool, list[float]] = {}

    def curve(packing: bool) -> list[float]:
        if packing not in found:
            path = run(folder, f"run-{packing}", packing=packing, learning_rate=2e-3)
            found[packing] = curve_of(path)
        return found[packing]

    return curve


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bf16", "packing": False},
        {"dtype": "bf16", "gradient_dtype": "bf16", "optim": "adamw_8bit"},
        {"dtype": "fp16"},
        {"dtype": "fp32"},
    ],
    ids=lambda changes: " ".join(map(str, changes.values())),
)
def test_losses_are_close_to_the_cpus(
    tmp_path: Path, on_the_cpu: Callable[[bool], list[float]], changes: dict[str, object]
) -> None:
    """The same sequences and weights: the GPU's loss curve stays close to the CPU's in fp32."""
    theirs = on_the_cpu(bool(changes.get("packing", True)))
    ours = curve_of(run(tmp_path, "run", device="cuda", learning_rate=2e-3, **changes))
    assert len(ours) == len(theirs) > 5
    assert theirs[-1] < theirs[0] - 0.1
    bound = 1e-4 if changes["dtype"] == "fp32" else 3e-3
    assert relative(ours, theirs) < bound


def test_a_runs_settings_do_not_affect_the_next_run(tmp_path: Path) -> None:
    """Nondeterministic attention works after a deterministic run, and all memory is usable after a run with a limit."""
    run(tmp_path, "first", **{**EXACT, "eval_steps": None, "save_steps": None, "memory_limit": "4GiB"})
    assert torch.cuda.get_per_process_memory_fraction() == 1.0
    run(tmp_path, "second", device="cuda", dtype="bf16", packing=False)
