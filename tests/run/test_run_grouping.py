"""group_by_length in complete runs: the loss of padded sequences, exact resumes, features that need one length."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_model import write_recipe
from whole_run import Silent, losses, relative, run

from trimtab import launch
from trimtab.facts.devices import DeviceFacts
from trimtab.facts.errors import RecipeError
from trimtab.plan.resolved import CompileConfig, CudaGraphsConfig
from trimtab.recipe import load
from trimtab.run.folder import read_json
from trimtab.run.prepare import prepare
from trimtab.run.resolve import resolve_recipe

GROUPED = {"packing": False, "group_by_length": True, "logging_steps": 1}


def test_a_step_over_an_epoch_has_the_loss_of_padded_sequences(tmp_path: Path) -> None:
    whole = {"gradient_accumulation_steps": 64, "num_train_epochs": 2, "logging_steps": 1, "packing": False}
    padded = run(tmp_path, "padded", **whole)
    grouped = run(tmp_path, "grouped", **whole, group_by_length=True)
    assert relative(losses(grouped), losses(padded)) < 1e-5
    fill = [read_json(folder / "plan.json")["data"]["fill"] for folder in (padded, grouped)]
    assert fill[1] > 1.3 * fill[0]


def test_killed_and_resumed(tmp_path: Path) -> None:
    whole = run(tmp_path, "whole", **GROUPED)

    class Stop(Exception):
        pass

    def stop(step: int) -> None:
        if step == 5:
            raise Stop

    path = write_recipe(tmp_path, **GROUPED, eval_steps=None, output_dir=str(tmp_path / "stopped"))
    with pytest.raises(Stop):
        launch.train(load(path), Silent(), after_step=stop)
    view = Silent()
    launch.resume(tmp_path / "stopped", [], view)
    assert losses(tmp_path / "stopped") == losses(whole)
    assert any(note.startswith("note: group_by_length: ") for note in view.messages)


def test_many_lengths_need_one_program_and_no_graphs(tmp_path: Path) -> None:
    gpu = DeviceFacts("NVIDIA H200", "cuda", 150 * 10**9, capability=(9, 0), bf16=True)
    shape = prepare(load(write_recipe(tmp_path))).shape

    def decided(**changes: object) -> tuple[CudaGraphsConfig, CompileConfig]:
        resolved = resolve_recipe(load(write_recipe(tmp_path, **changes)), shape, gpu, 1)
        return resolved.graphs, resolved.compile

    graphs, compiling = decided(packing=False)
    assert (graphs.enabled, compiling.dynamic) == (True, False)
    graphs, compiling = decided(**GROUPED)
    assert graphs == CudaGraphsConfig(
        False, "group_by_length makes microbatches of many lengths, and a graph has a fixed one"
    )
    assert compiling.dynamic is True
    with pytest.raises(RecipeError, match="cuda_graphs: true is not possible here: group_by_length"):
        decided(**GROUPED, cuda_graphs=True)


def test_memory_is_planned_for_the_longest(tmp_path: Path) -> None:
    plans = [
        prepare(load(write_recipe(tmp_path, packing=False, group_by_length=grouped))).plan.memory
        for grouped in (False, True)
    ]
    assert plans[0] == plans[1]
