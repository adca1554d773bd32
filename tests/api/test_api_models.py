"""A loaded model as the start of a run, and results as objects."""

from __future__ import annotations

import importlib
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from api_world import CHATS, TEXTS, quiet, tiny_recipe

import trimtab


def weights(model: trimtab.Model) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.opened.decoder.named_parameters()}


def train(folder: Path, name: str, **more: Any) -> trimtab.RunResult:
    recipe = {**tiny_recipe(folder, output_dir=str(folder / name)), "seed": 1}
    return trimtab.train(recipe, view=quiet(), **{"data": TEXTS, **more})


def test_an_unchanged_model_is_loaded_from_its_source(tmp_path: Path) -> None:
    named = train(tmp_path, "named")
    model = trimtab.load(tmp_path / "model", dtype="fp32", device="cpu")
    before = weights(model)
    run = train(tmp_path, "loaded", model=model)
    assert run.losses == named.losses
    assert not (run.folder / "start").exists()
    assert f"name: {tmp_path / 'model'}\n" in (run.folder / "recipe.yaml").read_text()
    after = weights(model)
    assert all(
        torch.equal(after[name], before[name]) for name in before
    )  # the passed model itself is not trained
    assert any(not torch.equal(weights(run.model())[name], before[name]) for name in before)


def test_a_changed_model_is_copied_and_resumed_from_the_copy(tmp_path: Path) -> None:
    plain = train(tmp_path, "plain")
    model = trimtab.load(tmp_path / "model", dtype="fp32", device="cpu")
    next(model.opened.decoder.parameters()).data.mul_(0.5)  # a version counter would not see this
    lora = {"r": 2, "target_modules": ["q_proj"]}
    whole = train(tmp_path, "whole", model=model, lora=lora)
    run = train(tmp_path, "run", model=model, lora=lora, callbacks=[StopAtOne()])
    assert whole.losses[0] != plain.losses[0]
    copied = trimtab.load(run.folder / "start", dtype="fp32", device="cpu")
    assert all(torch.equal(tensor, weights(model)[name]) for name, tensor in weights(copied).items())
    moved = run.folder.rename(tmp_path / "moved")
    shutil.copytree(tmp_path / "model", run.folder / "start")  # another run, where this one was
    assert trimtab.load(moved).generate("the cat", max_new_tokens=2)
    run = trimtab.resume(moved, view=quiet())
    assert run.losses == whole.losses
    shutil.copytree(tmp_path / "model", run.folder / "start", dirs_exist_ok=True)
    with pytest.raises(trimtab.TrimtabError, match="other base weights"):
        trimtab.resume(run.folder, view=quiet())


def test_start_killed_while_writing_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = trimtab.load(tmp_path_model(tmp_path), dtype="fp32", device="cpu")
    next(model.opened.decoder.parameters()).data.mul_(0.5)
    left = tmp_path / "left"

    def killed(recipe: Any, opened: Any, folder: Path, on_event: Any) -> None:
        (folder / ".start.tmp-0123abcd").mkdir()
        shutil.copytree(folder, left)
        text = (left / "recipe.yaml").read_text()
        (left / "recipe.yaml").write_text(text.replace(str(folder), str(left)))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("trimtab.run.lifecycle.start_from", killed)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path, "run", model=model)
    with pytest.raises(trimtab.TrimtabError, match="pass the model again"):
        trimtab.resume(left, view=quiet())
    assert train(tmp_path, "left", model=model).status == "finished"


def tmp_path_model(folder: Path) -> Path:
    tiny_recipe(folder)
    return folder / "model"


class StopAtOne:
    def on_step_end(self, control: Any) -> None:
        control.stop()


def test_a_run_starts_from_the_end_of_another(tmp_path: Path) -> None:
    first = train(tmp_path, "first")
    first.model().save(tmp_path / "saved", dtype="fp32")
    named = train(tmp_path, "named", model={"name": str(tmp_path / "saved")}, lr_scheduler_type="constant")
    second = train(tmp_path, "second", model=first.model(), lr_scheduler_type="constant")
    assert second.losses == named.losses
    assert second.model().generate("the cat", max_new_tokens=4)
    # The other keys of the recipe's model section apply to a loaded model too: conversations need the template.
    assert train(tmp_path, "chats", model=first.model(), data=CHATS).step == 3


def test_models_from_which_no_run_can_start(tmp_path: Path) -> None:
    adapted = train(tmp_path, "adapted", lora={"r": 2, "target_modules": ["q_proj"]}, max_steps=1)
    model = adapted.model()
    with pytest.raises(trimtab.TrimtabError, match="the model has adapters \\(default\\)") as raised:
        train(tmp_path, "next", model=model)
    assert "model.merge(folder)" in raised.value.remedy
    model.merge(tmp_path / "merged", dtype="fp32")
    named = train(tmp_path, "named", model=tmp_path / "merged", max_steps=1)
    assert train(tmp_path, "next", model=model, max_steps=1).losses == named.losses
    quantized = train(tmp_path, "quantized", lora={"r": 2}, load_in_8bit=True, max_steps=1).model()
    with pytest.raises(trimtab.TrimtabError, match="the model has adapters"):
        train(tmp_path, "other", model=quantized)
    with pytest.raises(trimtab.TrimtabError, match=r"model is the result of a run .*; give run.model\(\)"):
        train(tmp_path, "other", model=adapted)
    plain = trimtab.load(tmp_path / "model")
    fresh = {**tiny_recipe(tmp_path), "output_dir": str(tmp_path / "other")}
    fresh["model"]["init"] = "random"
    with pytest.raises(trimtab.TrimtabError, match=r"model\.init: random requests new weights"):
        trimtab.train(fresh, model=plain, data=TEXTS, view=quiet())
    assert not (tmp_path / "other").exists()


def test_a_recipe_file_takes_a_loaded_model(tmp_path: Path) -> None:
    import json

    recipe = tiny_recipe(tmp_path)
    del recipe["model"]["name"]
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    model = trimtab.load(tmp_path / "model", dtype="fp32", device="cpu")
    assert trimtab.train(tmp_path / "recipe.yaml", model=model, data=CHATS, view=quiet()).step == 3
    assert trimtab.plan_run(tmp_path / "recipe.yaml", model=model, data=CHATS)["model"]["parameters"] > 0


def test_results_are_plain_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = train(tmp_path, "run", eval_steps=1)
    assert repr(run) == f"RunResult('{tmp_path / 'run'}', finished at step 3, loss {run.losses[-1]:.4f})"
    assert [row["step"] for row in run.history] == [1, 2, 3]
    assert set(run.history[0]) >= {"loss", "lr", "grad_norm", "tokens", "tokens_per_second", "seconds"}
    assert run.losses == [row["loss"] for row in run.history]
    assert run.final_loss == run.losses[-1]
    assert [(one.step, one.name) for one in run.evaluations] == [(step, "domain") for step in range(4)]
    assert run.best is not None
    assert run.best.loss == min(one.loss for one in run.evaluations if one.step)
    assert run.best.step == run.model("best").opened.step

    frames = types.ModuleType("pandas")

    class DataFrame:
        def __init__(self, rows: list[dict[str, Any]], columns: list[str]) -> None:
            self.rows, self.columns = rows, columns

        def set_index(self, name: str) -> DataFrame:
            assert name == "step"
            return self

    frames.DataFrame = DataFrame  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pandas", frames)
    table = run.to_pandas()
    assert [row["step"] for row in table.rows] == [0, 1, 2, 3]
    assert table.rows[3]["eval_domain_loss"] == run.evaluations[-1].loss
    assert table.columns[:2] == ["step", "loss"]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(trimtab.TrimtabError, match="to_pandas needs pandas; pip install pandas"):
        run.to_pandas()
    shutil.rmtree(run.folder)
    assert repr(importlib.import_module("trimtab").RunResult(run.folder, "finished", 3)) == (
        f"RunResult('{tmp_path / 'run'}', finished at step 3)"
    )
