"""A failed capture of a CUDA graph is an event of the run: in its log and in its report."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_model import write_recipe
from whole_run import Silent, records

from trimtab import launch
from trimtab.plan.resolved import CudaGraphsConfig, Resolved
from trimtab.recipe import load
from trimtab.report import read_run, write_page
from trimtab.run import build, prepare

MESSAGE = "CUDA graph capture failed, and steps run eagerly: CUDA out of memory."


class FailingGraphs:
    """Runs eagerly, and reports in the third step that a capture failed."""

    captures = 1

    def __init__(self, loss: Any, parameters: Any, device: torch.device, *, on_event: Any, **_: Any) -> None:
        self.loss, self.parameters, self.on_event = loss, parameters, on_event
        self.steps = 0

    def backward(self, batch: Any, factor: float) -> torch.Tensor:
        first = all(parameter.grad is None for parameter in self.parameters.values())
        self.steps += first
        if first and self.steps == 3:
            self.on_event(MESSAGE)
        loss: torch.Tensor = self.loss.compute(self.loss.inputs(batch))
        (loss * factor).backward()
        return loss.detach()

    def release(self) -> None:
        pass


def test_it_is_in_the_log_and_in_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve_recipe = prepare.resolve_recipe

    def with_graphs(*args: Any) -> Resolved:
        return dataclasses.replace(resolve_recipe(*args), graphs=CudaGraphsConfig(True, "for this test"))

    monkeypatch.setattr(prepare, "resolve_recipe", with_graphs)
    monkeypatch.setattr(build, "Graphs", FailingGraphs)
    path = write_recipe(tmp_path, max_steps=4, num_train_epochs=None, eval_steps=None, save_steps=None)
    view = Silent()
    assert launch.train(load(path), view).status == "finished"
    run = tmp_path / "run"
    assert records(run, "event") == [{"kind": "event", "step": 2, "message": MESSAGE}]
    assert view.messages.count(MESSAGE) == 1
    write_page(read_run(run), tmp_path / "report.html")
    assert MESSAGE in (tmp_path / "report.html").read_text()
