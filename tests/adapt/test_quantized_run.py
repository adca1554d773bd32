"""QLoRA from a recipe: trained, stopped, resumed and loaded, with 4- and 8-bit weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_world import token_ids
from tiny_model import tiny_shape, write_recipe, write_tiny_model

import trimtab
from trimtab import adapt
from trimtab.adapt import quantized_ops
from trimtab.adapt.quantized import quantized_layers
from trimtab.adapt.quantized_layout import describe
from trimtab.facts.errors import RecipeError
from trimtab.recipe import load
from trimtab.run.lifecycle import resume, train
from trimtab.run.models import open_model


class Quiet:
    total_steps = 0

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []

    def plan(self, plan: dict[str, Any]) -> None: ...
    def message(self, text: str) -> None: ...
    def progress(self, what: str, done: int, total: int | None, unit: str = "") -> None: ...

    def record(self, record: dict[str, Any]) -> None:
        self.records.append(record)


def losses(view: Quiet) -> list[float]:
    return [record["loss"] for record in view.records if record["kind"] == "train"]


QLORA = {"lora": {"r": 4}, "max_steps": 6, "num_train_epochs": None, "logging_steps": 1, "eval_steps": None}


@pytest.mark.parametrize("bits", ["load_in_4bit", "load_in_8bit"])
def test_a_run_trains_and_resumes_bitwise(bits: str, tmp_path: Path) -> None:
    recipe = load(write_recipe(tmp_path, **{**QLORA, bits: True}))
    whole = Quiet()
    train(recipe, whole)
    kept = json.loads((tmp_path / "run" / "choices.json").read_text())
    assert kept["quantization"]["kind"] == ("nf4" if bits == "load_in_4bit" else "int8")
    assert kept["quantization"]["impl"] == "reference"
    assert losses(whole)[-1] < losses(whole)[0]

    class Stop(Exception):
        pass

    def stop(step: int) -> None:
        if step == 4:
            raise Stop

    other = load(write_recipe(tmp_path, **{**QLORA, bits: True, "output_dir": str(tmp_path / "stopped")}))
    with pytest.raises(Stop):
        train(other, Quiet(), after_step=stop)
    rest = Quiet()
    resume(tmp_path / "stopped", [], rest)
    assert losses(rest) == losses(whole)[-len(losses(rest)) :]

    opened = open_model(str(tmp_path / "run"), device=torch.device("cpu"), on_event=print)
    assert describe(opened.decoder).startswith(f"14 linear layers in {kept['quantization']['kind']}")
    assert adapt.active_adapters(opened.decoder) == ["default"]


def test_a_bf16_run_loads_in_fp32_with_the_same_codes(tmp_path: Path) -> None:
    changes = {**QLORA, "load_in_4bit": True, "dtype": "bf16", "max_steps": 1}
    train(load(write_recipe(tmp_path, **changes)), Quiet())
    models = [
        open_model(str(tmp_path / "run"), device=torch.device("cpu"), dtype=dtype, on_event=print).decoder
        for dtype in ("bf16", "fp32")
    ]
    for (_, a), (_, b) in zip(*map(quantized_layers, models), strict=True):
        assert torch.equal(a.packed[0], b.packed[0])  # type: ignore[arg-type]
        assert torch.equal(a.packed[1], b.packed[1])  # type: ignore[arg-type]
    assert models[1](token_ids(tiny_shape())).dtype == torch.float32


def test_generating_on_a_cpu_dequantizes_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train(load(write_recipe(tmp_path, **{**QLORA, "load_in_4bit": True, "max_steps": 1})), Quiet())
    plain = trimtab.load(tmp_path / "run", device="cpu")
    monkeypatch.setattr("trimtab.run.quantizing.host_memory", lambda: (2**30, 1000))
    expected = plain.generate("the cat", max_new_tokens=8)
    assert all(layer.dequantized_copy is None for _, layer in quantized_layers(plain.opened.decoder))
    assert "4-bit weights are dequantized for each token, which is slow" in capsys.readouterr().err
    monkeypatch.undo()
    model, calls = trimtab.load(tmp_path / "run", device="cpu"), []
    dequantize = quantized_ops.dequantize
    monkeypatch.setattr(quantized_ops, "dequantize", lambda *a: calls.append(1) or dequantize(*a))
    assert model.generate("the cat", max_new_tokens=8) == expected
    assert len(calls) == 14, "seven weights of two layers, each once"
    assert "4-bit weights are dequantized once; the copies need" in capsys.readouterr().err
    assert model.generate(["the cat"], max_new_tokens=8) == [expected]
    assert len(calls) == 14
    assert "dequantized" not in capsys.readouterr().err


@pytest.mark.oracle
def test_a_run_on_files_of_bitsandbytes(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    transformers = pytest.importorskip("transformers")
    source = write_tiny_model(tmp_path / "plain", hidden_size=64, intermediate_size=128)
    settings = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        source, quantization_config=settings, dtype=torch.float32
    )
    theirs.save_pretrained(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).write_bytes((source / name).read_bytes())
    single = {**QLORA, "load_in_4bit": True, "bnb_4bit_use_double_quant": False}
    view = Quiet()
    train(load(write_recipe(tmp_path, **single)), view)
    assert losses(view)[-1] < losses(view)[0]
    for changes, message in (
        ({"bnb_4bit_use_double_quant": True}, "set bnb_4bit_use_double_quant: false"),
        (
            {"load_in_4bit": False, "bnb_4bit_use_double_quant": True, "load_in_8bit": True},
            "set load_in_4bit: true",
        ),
    ):
        recipe = load(write_recipe(tmp_path, **{**single, **changes, "output_dir": str(tmp_path / "no")}))
        with pytest.raises(RecipeError, match=message):
            train(recipe, Quiet())
