"""Predicted memory of evaluation and generation, for out-of-memory reports, against allocated memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_model import write_tiny_model

import trimtab
from trimtab.adapt.any_model import quantize_linears
from trimtab.lab.memory import peak_bytes
from trimtab.run.inference_memory import predict_generation, predict_losses, predict_prompts
from trimtab.run.memory_report import PredictedMemory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> trimtab.Model:
    return trimtab.load(str(write_tiny_model(tmp_path_factory.mktemp("model"))), device="cpu", dtype="fp32")


def check(predicted: PredictedMemory, model: trimtab.Model, peak: int) -> None:
    weights = sum(p.nbytes for p in model.opened.decoder.parameters())
    assert predicted.buckets["weights"] >= weights
    assert sum(predicted.buckets.values()) == predicted.allocated < predicted.process
    # At least the measured peak, and at most half above it.
    assert 0.8 * peak <= predicted.buckets["activations"] <= 1.5 * peak


@pytest.mark.parametrize("rows", [1, 3])
def test_generation(model: trimtab.Model, rows: int) -> None:
    prompts = [" ".join(["the cat"] * 20)] * rows
    ids = [model.opened.tokenizer.encode_prompt(prompt) for prompt in prompts]
    given = prompts if rows > 1 else prompts[0]
    model.generate(given, max_new_tokens=8)
    peak = peak_bytes(lambda: model.generate(given, max_new_tokens=8), "cpu")
    check(predict_prompts(model.opened.decoder, ids, 8, batch_size=16), model, peak)


def test_losses(model: trimtab.Model) -> None:
    texts = [" ".join(["the cat sat"] * 12)] * 4
    tokens = len(model.opened.tokenizer.encode_prompt(texts[0]))
    model.loss(texts)
    peak = peak_bytes(lambda: model.loss(texts), "cpu")
    check(predict_losses(model.opened.decoder, 4, tokens, packed=True), model, peak)


def test_more_rows_and_tokens_take_more(model: trimtab.Model) -> None:
    decoder = model.opened.decoder
    sizes = [
        predict_generation(decoder, rows, 200, new).allocated for rows, new in ((1, 8), (8, 8), (8, 4000))
    ]
    assert sizes == sorted(set(sizes))


def test_quantized_layers_need_a_dequantized_copy(tmp_path: Path) -> None:
    plain = trimtab.load(str(write_tiny_model(tmp_path)), device="cpu", dtype="fp32").opened.decoder
    before = predict_losses(plain, 2, 16, packed=True)
    packed = quantize_linears(plain, "int8")
    assert any(isinstance(p, torch.nn.Parameter) and p.dtype == torch.int8 for p in packed.parameters())
    after = predict_losses(packed, 2, 16, packed=True)
    assert after.buckets["weights"] < before.buckets["weights"]
    assert after.buckets["activations"] > before.buckets["activations"]
