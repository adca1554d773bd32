"""The loss curve does not depend on how a step's sequences are split over microbatches and processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import write_recipe
from whole_run import Silent, losses, records, relative, run

from trimtab import launch
from trimtab.api import load

ONCE: dict[str, object] = {"eval_steps": None, "save_steps": None, "num_train_epochs": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("spreading")


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """16×1: one microbatch per step."""
    return run(folder, "16x1", **ONCE, per_device_train_batch_size=16, gradient_accumulation_steps=1)


@pytest.mark.parametrize(("batch", "accumulation"), [(1, 16), (4, 4), (3, 5)])
def test_the_curve_is_the_same(folder: Path, whole: Path, batch: int, accumulation: int) -> None:
    other = run(
        folder, f"{batch}x{accumulation}", **ONCE,
        per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation,
    )  # fmt: skip
    if batch * accumulation != 16:  # the control: other sequences in a step give another curve
        assert relative(losses(other)[:2], losses(whole)[:2]) > 1e-3
        return
    tokens = [record["tokens"] for record in records(whole, "train")]
    steps = [b - a for a, b in zip([0, *tokens], tokens, strict=False)]
    assert min(steps) < 0.8 * max(steps), "the last step of an epoch should be a smaller one here"
    assert relative(losses(other), losses(whole)) < 1e-5
    assert [r["tokens"] for r in records(other, "train")] == tokens
    for kind in ("domain", "general"):
        ours, theirs = ([r["loss"] for r in records(f, "eval") if r["name"] == kind] for f in (other, whole))
        assert relative(ours, theirs) < 1e-5


DROPOUT: dict[str, object] = {
    **ONCE,
    "num_train_epochs": 2,
    "lora": {"r": 4, "lora_dropout": 0.5},
    "learning_rate": 0.03,
}


@pytest.mark.parametrize(
    "memory", [{}, {"recompute": "block", "mlp_tiles": 3}], ids=["plain", "recomputed in tiles"]
)
def test_dropout_does_not_depend_on_the_split(folder: Path, memory: dict[str, object]) -> None:
    """Masks belong to sequences of a step, not to microbatches: the last step of an epoch is a smaller one here."""
    name = "dropout" + "-tiles" * bool(memory)
    whole, *others = (
        run(
            folder, f"{name}-{batch}", **DROPOUT, **memory,
            per_device_train_batch_size=batch, gradient_accumulation_steps=16 // batch,
        )
        for batch in (16, 4, 1)
    )  # fmt: skip
    for other in others:
        assert relative(losses(other), losses(whole)) < 1e-5


@pytest.fixture(scope="module")
def two(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, dict[str, str]]]]:
    """Two gloo processes with a file rendezvous: their folder, and how each ended."""
    work = tmp_path_factory.mktemp("two")
    for mode in ("train", "dropout", "signal", "poison"):
        recipe = write_recipe(
            folder,
            **(DROPOUT if mode == "dropout" else ONCE),
            output_dir=str(work / mode),
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
        )
        recipe.rename(work / f"{mode}.yaml")
    here = Path(__file__).parent
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (here, here.parent, here.parents[1]))),
    }
    command = [sys.executable, str(here / "mesh_rank.py"), str(work)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "2"],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    ended = []
    try:
        for rank in ranks:
            output, _ = rank.communicate(timeout=120)
            assert rank.returncode == 0, output
            ended.append(json.loads(output.splitlines()[-1]))
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return work, ended


def as_one_process(folder: Path, whole: Path) -> None:
    """The recipe and choices of the single-process run, with the checkpoints of two."""
    for name in ("recipe.yaml", "choices.json"):
        shutil.copy(whole / name, folder / name)


@pytest.mark.slow
def test_two_processes_train_as_one(whole: Path, two: tuple[Path, list[Any]]) -> None:
    work, ended = two
    assert [rank["train"] for rank in ended] == [{"status": "finished"}] * 2
    both = work / "train"
    assert relative(losses(both), losses(whole)) < 1e-5
    assert [r["step"] for r in records(both, "train")] == [r["step"] for r in records(whole, "train")]
    assert [r["tokens"] for r in records(both, "train")] == [r["tokens"] for r in records(whole, "train")]
    as_one_process(both, whole)
    # One process loads what two have saved: the same weights as the single-process run.
    theirs = dict(load(whole, dtype="fp32", device="cpu").opened.decoder.named_parameters())
    ours = dict(load(both, dtype="fp32", device="cpu").opened.decoder.named_parameters())
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter, theirs[name], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_two_processes_have_the_dropout_masks_of_one(folder: Path, two: tuple[Path, list[Any]]) -> None:
    work, ended = two
    assert [rank["dropout"] for rank in ended] == [{"status": "finished"}] * 2
    batch = {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1}
    alone = run(folder, "dropout-alone", **DROPOUT, **batch)
    assert relative(losses(work / "dropout"), losses(alone)) < 1e-5


@pytest.mark.slow
def test_one_process_resumes_a_run_of_two(whole: Path, two: tuple[Path, list[Any]]) -> None:
    """A signal to one process saved and stopped both; one process continues, with all sequences of a step."""
    work, ended = two
    stopped = work / "signal"
    assert [rank["signal"] for rank in ended] == [{"status": "interrupted"}] * 2
    assert len(losses(stopped)) == 3 < len(losses(whole))
    as_one_process(stopped, whole)
    assert launch.resume(stopped, [], Silent()).status == "finished"
    assert relative(losses(stopped), losses(whole)) < 1e-5


@pytest.mark.slow
def test_a_bad_step_on_one_process_stops_both(two: tuple[Path, list[Any]]) -> None:
    for rank in two[1]:
        message = rank["poison"]["error"]
        assert "not finite at step 3" in message
        assert "saved as step 2" in message
        assert "embed_tokens" in message, "the layer is named on every process"
