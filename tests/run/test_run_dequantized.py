"""Runs whose quantized weights also have dequantized copies: same losses and files; changed or kept on resume."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_model import write_recipe

import trimtab
from trimtab.adapt import workspace
from trimtab.adapt.quantized import quantized_layers
from trimtab.cli.main import main
from trimtab.facts.errors import RecipeError
from trimtab.parallel import Mesh
from trimtab.recipe import load
from trimtab.run.build import build_training_model, make_dequantized_copies
from trimtab.run.lifecycle import resume, train
from trimtab.run.prepare import prepare


class Watched:
    total_steps = 0

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.plans: list[dict[str, Any]] = []

    def plan(self, plan: dict[str, Any]) -> None:
        self.plans.append(plan)

    def message(self, text: str) -> None: ...
    def progress(self, what: str, done: int, total: int | None, unit: str = "") -> None: ...

    def record(self, record: dict[str, Any]) -> None:
        self.records.append(record)


QLORA: dict[str, Any] = {
    "lora": {"r": 4},
    "load_in_4bit": True,
    "max_steps": 6,
    "num_train_epochs": None,
    "logging_steps": 1,
    "eval_steps": None,
    "save_steps": 3,
}


def recipe(folder: Path, name: str, **changes: Any) -> Any:
    folder.mkdir(exist_ok=True)
    return load(write_recipe(folder, **{**QLORA, "output_dir": str(folder / name), **changes}))


def losses(run: Path) -> list[float]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if record["kind"] == "train"]


def tensors(run: Path) -> dict[str, torch.Tensor]:
    """Of the last checkpoint."""
    last = max((run / "checkpoints").glob("step-*"))
    return {name: t for file in sorted(last.rglob("*.safetensors")) for name, t in load_file(file).items()}


def equal(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    assert mine.keys() == theirs.keys()
    return all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same recipe with no layer and with all layers unpacked."""
    home = tmp_path_factory.mktemp("unpacked")
    for layers in (0, 2):
        train(recipe(home, f"run{layers}", dequantized_layers=layers), Watched())
    return home / "run0", home / "run2"


def test_losses_and_checkpoints_are_the_same(runs: tuple[Path, Path]) -> None:
    packed, unpacked = runs
    assert losses(packed)[-1] < losses(packed)[0]
    assert losses(unpacked) == losses(packed)
    assert equal(tensors(unpacked), tensors(packed))
    chosen = json.loads((unpacked / "choices.json").read_text())["memory"]
    assert chosen["dequantized_layers"] == 2
    assert chosen["sentence"] == "none in all 2 layers; weights of 2 also dequantized"


def test_exported_files_are_the_same(runs: tuple[Path, Path], tmp_path: Path) -> None:
    found = []
    for run in runs:
        assert main(["merge", str(run), str(tmp_path / run.name), "--dtype", "fp32"]) == 0
        found.append(load_file(tmp_path / run.name / "model.safetensors"))
    assert equal(*found)
    opened = trimtab.load(runs[1], dtype="fp32", device="cpu").opened.decoder
    assert all(layer.dequantized_copy is None for _, layer in quantized_layers(opened)), (
        "training alone is in a hurry"
    )


@pytest.mark.parametrize("overrides", [[], ["dequantized_layers=1"], ["dequantized_layers=auto"]], ids=str)
def test_a_resumed_run_continues_bit_by_bit(
    runs: tuple[Path, Path], overrides: list[str], tmp_path: Path
) -> None:
    for run in runs:
        stopped = stopped_copy(run, tmp_path)
        view = Watched()
        resume(stopped, overrides, view)
        assert losses(stopped) == losses(run)
        assert equal(tensors(stopped), tensors(run))
        began = int(run.name.removeprefix("run"))
        expected = {(): began, ("dequantized_layers=1",): 1, ("dequantized_layers=auto",): 0}[
            tuple(overrides)
        ]
        assert view.plans[0]["choices"]["memory"].get("dequantized_layers") == expected


def stopped_copy(run: Path, folder: Path) -> Path:
    """The run folder as it was after half its steps."""
    stopped = folder / run.name
    shutil.copytree(run, stopped)
    shutil.rmtree(stopped / "checkpoints" / "step-00000006")
    (stopped / "checkpoints" / "latest").write_text("step-00000003\n")
    return stopped


def test_folders_without_the_key_resume(runs: tuple[Path, Path], tmp_path: Path) -> None:
    stopped = stopped_copy(runs[0], tmp_path)
    kept = json.loads((stopped / "choices.json").read_text())
    del kept["memory"]["dequantized_layers"]
    del kept["recipe"]["dequantized_layers"]
    (stopped / "choices.json").write_text(json.dumps(kept))
    lines = (stopped / "recipe.yaml").read_text().splitlines(keepends=True)
    (stopped / "recipe.yaml").write_text(
        "".join(line for line in lines if not line.startswith("dequantized_layers"))
    )
    resume(stopped, [], Watched())
    assert losses(stopped) == losses(runs[0])


def test_the_copies_are_there_before_the_first_step(tmp_path: Path) -> None:
    asked = recipe(tmp_path, "run", dequantized_layers=1, dtype="bf16")
    prepared = prepare(asked)
    decoder = build_training_model(asked, prepared.resolved, prepared.shape, Mesh.single(), prepared.model)
    assert all(layer.dequantized_copy is None for _, layer in quantized_layers(decoder)), (
        "nothing whole while loading"
    )
    make_dequantized_copies(decoder, prepared.resolved)
    formats = [
        None if layer.dequantized_copy is None else layer.dequantized_copy.dtype
        for _, layer in quantized_layers(decoder)
    ]
    assert formats == [torch.bfloat16] * 7 + [None] * 7


def test_more_layers_than_there_are(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="dequantized_layers names 3 layers and the model has 2"):
        prepare(recipe(tmp_path, "run", dequantized_layers=3))


def test_the_workspace_of_an_earlier_run_is_not_counted(tmp_path: Path) -> None:
    """In one process: a buffer that another model's products left is freed, and is no activation of this run."""
    recipe = load(
        write_recipe(
            tmp_path, output_dir=str(tmp_path / "run"), max_steps=2, num_train_epochs=None, device="cpu"
        )
    )
    with workspace.borrow((2**22,), torch.uint8, torch.device("cpu")):
        pass
    assert workspace.allocated_bytes("cpu") == 2**22
    train(recipe, Watched())  # type: ignore[arg-type]
    assert workspace.allocated_bytes("cpu") == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    peak = next(row for row in rows if row["kind"] == "memory" and row["when"] == "peak")
    assert peak["activations"] < 2**22
