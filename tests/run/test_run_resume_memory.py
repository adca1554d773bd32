"""Another memory limit on resume: MLP tiles and the loss's chunks, which affect rounding, stay; the plan is stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_model import write_recipe, write_tiny_model
from whole_run import Silent

from trimtab import launch
from trimtab.facts.devices import DeviceFacts
from trimtab.facts.errors import ResourceError
from trimtab.facts.shapes import uniform_shape
from trimtab.plan import Plan, check_fits
from trimtab.recipe import load
from trimtab.run import lifecycle
from trimtab.run import prepare as preparing
from trimtab.run.prepare import Prepared, StoredConfig, prepare

QWEN = uniform_shape(
    "qwen3",
    151_936,
    1024,
    3072,
    28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    max_positions=32_768,
    tie_embeddings=True,
)
GPU = DeviceFacts(
    "NVIDIA H200",
    "cuda",
    150 * 10**9,
    free_bytes=140 * 10**9,
    capability=(9, 0),
    bf16=True,
    triton=True,
    host_free_bytes=120 * 2**30,
)


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe that is planned for a large model on a large GPU."""
    monkeypatch.setattr(preparing, "detect", lambda *_: GPU)
    monkeypatch.setattr(preparing, "shape_of", lambda *_: QWEN)
    monkeypatch.setattr(preparing, "read_shape", lambda *_: QWEN)
    write_tiny_model(tmp_path / "model")
    return write_recipe(
        tmp_path, dtype="bf16", device="auto", max_seq_length=4096, per_device_train_batch_size=8
    )


def resumed(begun: Prepared, recipe: Path, *changes: str) -> Prepared:
    return prepare(
        load(recipe, changes),
        StoredConfig(begun.resolved, begun.model, None, begun.device, memory_changed=True),
    )


@pytest.mark.parametrize(
    "changes",
    [("memory_limit=20GB",), ("memory_limit=60GB",), ("memory_limit=12GB",), ("recompute=offload",)],
    ids=" ".join,
)
def test_the_loss_keeps_its_chunks(recipe: Path, changes: tuple[str, ...]) -> None:
    begun = prepare(load(recipe, ["memory_limit=13GB"]))
    other = ["memory_limit=13GB"] if "memory_limit" not in changes[0] else []
    again = resumed(begun, recipe, *other, *changes)
    before, after = begun.resolved.memory_plan, again.resolved.memory_plan
    allowed = begun.resolved.loss.memory_bytes
    assert allowed is not None
    assert before.loss_memory is not None
    assert allowed > before.loss_memory, "the limit decided it"
    assert (after.loss_memory, after.mlp_tiles) == (before.loss_memory, before.mlp_tiles)
    check_fits(again.plan, GPU, resumed=True)


def stopped(folder: Path, **changes: object) -> Path:
    """A finished run of two steps."""
    path = write_recipe(folder, max_steps=2, num_train_epochs=None, eval_steps=None, save_steps=2, **changes)
    assert launch.train(load(path), Silent()).status == "finished"
    return folder / "run"


def stored(run: Path, name: str) -> dict[str, Any]:
    return json.loads((run / name).read_text())


def test_a_changed_memory_plan_is_stored_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = stopped(tmp_path)
    began = stored(run, "choices.json")
    assert began["memory"]["recompute"] == ["none", "none"]
    changed = ["recompute=block", "cuda_graphs=false", "num_threads=1", "max_steps=3"]
    assert launch.resume(run, changed, Silent()).status == "finished"
    choices = stored(run, "choices.json")
    assert choices["memory"]["recompute"] == ["block", "block"]
    assert choices["memory"] == stored(run, "plan.json")["choices"]["memory"]
    assert choices["recipe"]["recompute"] == "block"
    assert choices["graphs"] == {"on": False, "reason": "set in the recipe"}
    assert began["graphs"]["reason"] != choices["graphs"]["reason"]
    # Everything else is what the run began with.
    kept = [key for key in began if key not in ("memory", "graphs", "recipe", "lengths")]
    assert [choices[key] for key in kept] == [began[key] for key in kept]
    assert choices["recipe"] == {**began["recipe"], "recompute": "block"}

    # Later starts use the stored plan, with whatever memory is then free.
    monkeypatch.setattr(preparing, "resolve_memory_on_resume", None)
    assert launch.resume(run, ["max_steps=4"], Silent()).status == "finished"
    assert stored(run, "choices.json")["memory"] == choices["memory"]
    assert stored(run, "plan.json")["choices"]["memory"] == choices["memory"]
    monkeypatch.undo()
    assert launch.resume(run, ["recompute=none", "max_steps=5"], Silent()).status == "finished"
    assert stored(run, "choices.json")["memory"]["recompute"] == ["none", "none"]


def test_a_memory_plan_that_an_earlier_version_did_not_store(tmp_path: Path) -> None:
    """recipe.yaml has the keys of its last resume, and choices.json those of the first start."""
    run = stopped(tmp_path)
    text = (run / "recipe.yaml").read_text()
    assert "recompute: auto" in text
    (run / "recipe.yaml").write_text(text.replace("recompute: auto", "recompute: block"))
    assert launch.resume(run, ["max_steps=3"], Silent()).status == "finished"
    assert stored(run, "choices.json")["memory"]["recompute"] == ["block", "block"]


def test_graphs_that_a_resume_requires_have_to_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = stopped(tmp_path)
    monkeypatch.setattr(preparing, "resolve_graphs", lambda recipe, shape, device, resolved: resolved)

    def refuse(plan: Plan, *_: object, **__: object) -> None:
        raise ResourceError(f"cuda_graphs: {plan.recipe.cuda_graphs} does not fit", "set cuda_graphs: auto")

    monkeypatch.setattr(lifecycle, "check_fits", refuse)
    with pytest.raises(ResourceError, match="cuda_graphs: True does not fit"):
        launch.resume(run, ["cuda_graphs=true", "max_steps=3"], Silent())
    assert launch.resume(run, ["cuda_graphs=auto", "max_steps=3"], Silent()).status == "finished"
