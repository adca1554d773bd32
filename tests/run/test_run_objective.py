"""Label smoothing and z-loss from a recipe: torch's loss at the first step, plain cross-entropy in evaluation."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from tiny_model import tiny_shape, write_recipe
from whole_run import Silent, losses, records

from trimtab import launch
from trimtab.kernels.attention.layout import Layout
from trimtab.model import build, init_weights
from trimtab.parallel import Mesh
from trimtab.recipe import load
from trimtab.report.plan_panel import plan_panel
from trimtab.run import corpora
from trimtab.run.build import build_training_model
from trimtab.run.folder import read_json
from trimtab.run.models import load_tokenizer
from trimtab.run.prepare import prepare

SMOOTHING, Z_LOSS = 0.2, 0.01
BOTH = {"label_smoothing_factor": SMOOTHING, "z_loss": Z_LOSS}
SHORT = {"max_steps": 2, "num_train_epochs": None, "save_steps": None, "logging_steps": 1, "eval_steps": None}


def first_step(path: Path, **terms: float) -> float:
    """The loss of the first step from full logits, through torch's own cross_entropy."""
    recipe = load(path)
    prepared = prepare(recipe)
    decoder = build_training_model(recipe, prepared.resolved, prepared.shape, Mesh.single(), prepared.model)
    tokenizer = load_tokenizer(prepared.model, prepared.shape)
    loader = corpora.open_corpora(recipe, tokenizer, Silent()).loader(Mesh.single())
    total, count = 0.0, 0
    with torch.no_grad():
        for batch in loader.next_step():
            layout = Layout.packed(batch.documents_BT)
            hidden_BTC = decoder(batch.input_ids_BT, batch.positions_BT, layout)
            logits_NV, labels_N = decoder.logits(hidden_BTC).flatten(0, 1), batch.labels_BT.flatten()
            smoothing = terms.get("label_smoothing_factor", 0.0)
            total += float(F.cross_entropy(logits_NV, labels_N, reduction="sum", label_smoothing=smoothing))
            lse_N = torch.logsumexp(logits_NV, -1)[labels_N != -100]
            total += terms.get("z_loss", 0.0) * float(lse_N.square().sum())
            count += batch.num_targets
    return total / count


@pytest.mark.parametrize("lora", [None, {"r": 4}], ids=["full", "lora"])
@pytest.mark.parametrize("terms", [{"label_smoothing_factor": SMOOTHING}, {"z_loss": Z_LOSS}, BOTH])
def test_the_first_step_has_torch_s_loss(tmp_path: Path, lora: Any, terms: dict[str, float]) -> None:
    changes = {**SHORT, "lora": lora} if lora else SHORT
    path = write_recipe(tmp_path, **changes, **terms)
    folder = launch.train(load(path), Silent()).folder
    expected, plain = first_step(path, **terms), first_step(path)
    assert losses(folder)[0] == pytest.approx(expected, rel=1e-5)
    assert abs(expected - plain) > 1e-4 * plain, "a run without the terms has another loss"


def test_evaluation_has_plain_cross_entropy_and_the_gradient_has_not(tmp_path: Path) -> None:
    runs = {}
    for name, terms in (("plain", {}), ("both", BOTH)):
        path = write_recipe(tmp_path, **SHORT, **terms, output_dir=str(tmp_path / name))
        runs[name] = launch.train(load(path), Silent()).folder
    before = {name: [r["loss"] for r in records(run, "eval") if r["step"] == 0] for name, run in runs.items()}
    after = {name: [r["loss"] for r in records(run, "eval") if r["step"] == 2] for name, run in runs.items()}
    assert before["plain"] == before["both"], "the same model, measured by the same loss"
    assert after["plain"] != after["both"]


def test_the_terms_are_kept_with_the_run_and_shown(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, **SHORT, **BOTH)
    folder = launch.train(load(path), Silent()).folder
    kept = read_json(folder / "choices.json")["loss"]
    assert (kept["label_smoothing"], kept["z_loss"]) == (SMOOTHING, Z_LOSS)
    console = Console(width=120, file=io.StringIO())
    with console.capture() as captured:
        console.print(plan_panel(read_json(folder / "plan.json"), 120))
    shown = " ".join(captured.get().replace("│", " ").split())
    assert "cross-entropy with label smoothing 0.2 and z-loss 0.01; evaluation measures plain" in shown


def test_a_resumed_run_repeats_the_losses(tmp_path: Path) -> None:
    changes = {**SHORT, **BOTH, "max_steps": 4}
    whole = launch.train(load(write_recipe(tmp_path, **changes)), Silent()).folder
    path = write_recipe(tmp_path, **changes, output_dir=str(tmp_path / "stopped"))

    class Stop(Exception):
        pass

    def stop(step: int) -> None:
        if step == 2:
            raise Stop

    with pytest.raises(Stop):
        launch.train(load(path), Silent(), after_step=stop)
    launch.resume(tmp_path / "stopped", [], Silent())
    assert losses(tmp_path / "stopped") == losses(whole)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_every_implementation_of_the_loss_gets_the_terms(impl: str) -> None:
    decoder = init_weights(
        build(tiny_shape(), dtype="fp32", device="cpu", attention="reference", loss_impl=impl), 0
    )
    ids_BT = torch.randint(0, 300, (2, 16), generator=torch.Generator().manual_seed(0))
    labels_BT = ids_BT.roll(-1, 1)
    logits_NV = decoder.logits(decoder(ids_BT)).flatten(0, 1)
    expected = F.cross_entropy(logits_NV, labels_BT.flatten(), reduction="sum", label_smoothing=SMOOTHING)
    expected = expected + Z_LOSS * torch.logsumexp(logits_NV, -1).square().sum()
    found = decoder.loss(ids_BT, labels_BT, label_smoothing=SMOOTHING, z_loss=Z_LOSS)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
