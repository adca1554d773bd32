"""Adapters on a CUDA device: gradients against fp64, packed or not, dropout as on a CPU, a run by command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from lora_cases import IDS_BT, UNTIED, base, scatter
from tiny_model import write_recipe

from trimtab.adapt import LoraSettings, add_adapters, init_adapters, quantize_layout, trained_parameters
from trimtab.adapt.lora_dropout import DropoutMasks, keep_mask
from trimtab.cli.main import main
from trimtab.model.decoder import Decoder

pytestmark = pytest.mark.gpu


def gradients(decoder: Decoder, device: str, dtype: torch.dtype) -> tuple[float, dict[str, torch.Tensor]]:
    decoder = decoder.to(device)
    for name, parameter in decoder.named_parameters():
        if parameter.is_floating_point() and (".lora_" not in name or dtype == torch.float64):
            parameter.data = parameter.data.to(dtype)
    ids_BT = IDS_BT.to(device)
    loss = decoder.loss(ids_BT, ids_BT, reduction="mean")
    loss.backward()
    found = {
        name: p.grad.double().cpu() for name, p in trained_parameters(decoder).items() if p.grad is not None
    }
    return float(loss), found


def adapted(settings: LoraSettings, kind: str | None = None) -> Decoder:
    decoder = base(UNTIED)
    if kind is not None:
        quantize_layout(decoder, kind)
    add_adapters(decoder, settings)
    init_adapters(decoder, seed=3)
    # Larger ones saturate the softmax, and 16-bit gradients are then inaccurate.
    return scatter(decoder, size=0.02)


@pytest.mark.parametrize("settings", [{}, {"use_dora": True}, {"use_rslora": True, "dtype": "bf16"}])
def test_gradients_in_bf16_are_close_to_fp64(settings: dict) -> None:
    lora = LoraSettings(r=4, **settings)
    truth_loss, truth = gradients(adapted(lora), "cpu", torch.float64)
    loss, found = gradients(adapted(lora), "cuda", torch.bfloat16)
    assert loss == pytest.approx(truth_loss, rel=0.01)
    assert found.keys() == truth.keys()
    for name, gradient in found.items():
        off = float((gradient - truth[name]).norm() / truth[name].norm())
        assert off < 0.06, (name, off)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_packed_weights_match_the_cpus_losses(kind: str) -> None:
    lora = LoraSettings(r=4)
    here, ours = gradients(adapted(lora, kind), "cpu", torch.float32)
    there, theirs = gradients(adapted(lora, kind), "cuda", torch.float32)
    assert there == pytest.approx(here, rel=1e-4)
    for name, gradient in theirs.items():
        torch.testing.assert_close(gradient, ours[name], rtol=1e-2, atol=1e-4 * float(ours[name].abs().max()))


def test_masks_match_the_cpu() -> None:
    keys = [DropoutMasks(["a", "b"], torch.device(device)) for device in ("cpu", "cuda")]
    for masks in keys:
        masks.set(5, step=7, first_sequence=2, tokens=90)
    one, two = (keep_mask(300, 200, masks.words_K5[1], 0.3).cpu() for masks in keys)
    assert torch.equal(one, two)


@pytest.mark.parametrize("bits", [{}, {"load_in_4bit": True}, {"load_in_8bit": True}])
def test_a_resumed_run_is_bitwise_identical(bits: dict, tmp_path: Path) -> None:
    common = {
        "device": "cuda", "dtype": "bf16", "deterministic": True, "num_train_epochs": None, "max_steps": 6,
        "save_steps": 3, "eval_steps": None, "logging_steps": 1, "lr_scheduler_type": "constant",
        "lora": {"r": 4, "lora_dropout": 0.1}, **bits,
    }  # fmt: skip
    recipe = write_recipe(tmp_path, **common)
    assert main(["train", str(recipe)]) == 0

    def losses() -> list[float]:
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        return [r["loss"] for r in map(json.loads, lines) if r["kind"] == "train"]

    whole = losses()
    checkpoints = tmp_path / "run" / "checkpoints"
    for path in (checkpoints / "step-00000006").iterdir():
        path.unlink()
    (checkpoints / "step-00000006").rmdir()
    assert main(["train", "--resume", str(tmp_path / "run")]) == 0
    assert losses() == whole
    assert main(["export", "peft", str(tmp_path / "run"), str(tmp_path / "adapter")]) == 0
    assert main(["merge", str(tmp_path / "run"), str(tmp_path / "merged")]) == 0
