"""Loss, likelihoods and answers against plain computations on tiny models."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trimtab import evaluate, starter, text
from trimtab.data.batch import Batch
from trimtab.evaluate import perplexity
from trimtab.facts.errors import DataError, TrainingError
from trimtab.facts.shapes import uniform_shape
from trimtab.kernels.attention import Layout
from trimtab.model import Decoder, build, init_weights

SHAPE = uniform_shape(
    "llama",
    vocab_size=4096,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=128,
    tie_embeddings=True,
)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    model = build(SHAPE, dtype="fp32", device="cpu", attention="reference")
    init_weights(model, 0)
    with torch.no_grad():
        # Fresh weights find everything equally likely; larger ones have opinions.
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6)
    return model


@pytest.fixture(scope="module")
def tokenizer() -> text.Tokenizer:
    return text.load(starter.base_folder())


def naive_log_likelihood(decoder: Decoder, ids: list[int]) -> float:
    """Σ ln p from full logits in fp64, one text alone."""
    with torch.no_grad():
        logits_TV = decoder.logits(decoder(torch.tensor([ids])))[0].double()
    scores_TV = logits_TV.log_softmax(-1)
    return sum(float(scores_TV[t, ids[t + 1]]) for t in range(len(ids) - 1))


def batch_of(rows: list[list[list[int]]], T: int) -> Batch:
    """Packed sequences of documents, arranged by hand."""
    B = len(rows)
    ids, labels = torch.zeros(B, T, dtype=torch.int64), torch.full((B, T), -100)
    positions, documents = torch.zeros(B, T, dtype=torch.int64), torch.full((B, T), -1, dtype=torch.int32)
    count = 0
    for b, row in enumerate(rows):
        t = 0
        for d, doc in enumerate(row):
            n = len(doc)
            ids[b, t : t + n] = torch.tensor(doc)
            labels[b, t : t + n - 1] = torch.tensor(doc[1:])
            positions[b, t : t + n] = torch.arange(n)
            documents[b, t : t + n] = d
            t, count = t + n, count + n - 1
    return Batch(ids, labels, positions, documents, count, [["x"] * len(row) for row in rows])


DOCUMENTS = [[5, 9, 100, 7], [300, 2, 2], [8, 1], [4000, 12, 13, 14, 15, 16, 17, 18, 19, 20]]


def test_loss_is_the_mean_over_tokens_of_all_documents(decoder: Decoder) -> None:
    a, b, c, d = DOCUMENTS
    batches = [batch_of([[a, b], [c]], 12), batch_of([[d]], 12)]
    result = evaluate.loss(decoder, batches)
    tokens = sum(len(doc) - 1 for doc in DOCUMENTS)
    expected = -sum(naive_log_likelihood(decoder, doc) for doc in DOCUMENTS) / tokens
    assert result.tokens == tokens
    assert result.loss == pytest.approx(expected, rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(expected), rel=1e-4)
    # A mean of the batches' means would be another number: this test can tell.
    means = [evaluate.loss(decoder, [one]).loss for one in batches]
    assert sum(means) / 2 != pytest.approx(expected, rel=1e-3)


def named(batch: Batch, origins: list[list[str]]) -> Batch:
    return replace(batch, origins=origins)


def test_losses_by_document_add_up_to_the_loss(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A document in two sequences is one; padding and documents without a target are none."""
    monkeypatch.setattr(perplexity, "MIN_DOCUMENTS", 3)
    a, b, c, d = DOCUMENTS
    batches = [
        named(batch_of([[a, b], [c]], 12), [["one:1", "one:2"], ["two:1"]]),
        named(batch_of([[[7]], [d]], 12), [["two:9"], ["one:2"]]),
    ]
    result = evaluate.loss(decoder, batches)
    units = result.units
    assert (units.unit, units.tokens) == ("document", [3, 2 + 9, 1])
    sums = [-naive_log_likelihood(decoder, doc) for doc in (a, b, c, d)]
    assert units.losses == pytest.approx([sums[0] / 3, (sums[1] + sums[3]) / 11, sums[2]], rel=1e-5)
    together = sum(v * n for v, n in zip(units.losses, units.tokens, strict=True)) / result.tokens
    assert together == pytest.approx(result.loss, rel=1e-6)


def test_losses_of_few_documents_are_kept_by_piece(decoder: Decoder) -> None:
    a, b, c, _ = DOCUMENTS
    units = evaluate.loss(decoder, [named(batch_of([[a, b], [c]], 12), [["x:1", "x:1"], ["x:1"]])]).units
    assert (units.unit, units.tokens) == ("piece", [3, 2, 1])


def test_losses_of_many_documents_are_added_up(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perplexity, "MIN_DOCUMENTS", 2)
    batch = batch_of([[doc] for doc in DOCUMENTS], 12)
    whole = evaluate.loss(decoder, [named(batch, [["w"], ["x"], ["y"], ["z"]])]).units
    monkeypatch.setattr(perplexity, "MAX_UNITS", 2)
    grouped = evaluate.loss(decoder, [named(batch, [["w"], ["x"], ["y"], ["z"]])]).units
    assert (grouped.unit, grouped.tokens) == ("group of documents", [3 + 2, 1 + 9])
    expected = (whole.losses[0] * 3 + whole.losses[1] * 2) / 5
    assert grouped.losses[0] == pytest.approx(expected, rel=1e-9)


def test_the_loss_is_bitwise_identical_to_the_summed_loss(decoder: Decoder) -> None:
    batches = [batch_of([[doc] for doc in DOCUMENTS], 12), batch_of([[DOCUMENTS[0]]], 12)]
    with torch.no_grad():
        sums = [
            decoder.loss(
                b.input_ids_BT, b.labels_BT, b.positions_BT, Layout.packed(b.documents_BT), reduction="sum"
            )
            for b in batches
        ]
    expected = float(torch.stack(sums).double().sum()) / sum(b.num_targets for b in batches)
    assert evaluate.loss(decoder, batches).loss == expected


def test_loss_does_not_depend_on_batching(decoder: Decoder) -> None:
    a, b, c, d = DOCUMENTS
    together = evaluate.loss(decoder, [batch_of([[a, b], [c], [d]], 12)])
    apart = evaluate.loss(decoder, (batch_of([row], 12) for row in ([a, b], [c], [d])))
    assert together.loss == pytest.approx(apart.loss, rel=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_the_decoder_is_kept(decoder: Decoder, training: bool) -> None:
    decoder.train(training)
    evaluate.loss(decoder, [batch_of([[DOCUMENTS[0]]], 12)])
    assert decoder.training is training
    with pytest.raises(DataError):
        evaluate.loss(decoder, [])
    assert decoder.training is training


def test_loss_keeps_no_graph_and_builds_no_logits(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any) -> None:
        raise AssertionError("logits were built")

    monkeypatch.setattr(Decoder, "logits", forbidden)
    evaluate.loss(decoder, [batch_of([[DOCUMENTS[0]]], 12)])
    assert all(p.grad is None for p in decoder.parameters())


def test_nothing_to_measure_is_an_error(decoder: Decoder) -> None:
    one = replace(batch_of([[[3]]], 4), num_targets=0)
    with pytest.raises(DataError, match="no target token"):
        evaluate.loss(decoder, [one])


def test_a_loss_that_is_not_finite_is_an_error() -> None:
    broken = build(SHAPE, dtype="fp32", device="cpu", attention="reference")
    init_weights(broken, 0)
    with torch.no_grad():
        broken.model.norm.weight.fill_(float("nan"))
    with pytest.raises(TrainingError, match="nan"):
        evaluate.loss(broken, [batch_of([[DOCUMENTS[0]]], 12)])


TEXTS = [
    "Tom has a dog.",
    "The",
    "She went to the market because she needed some bread and cheese.",
    "A b c",
    "",
]


@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_log_likelihoods_equal_each_text_alone(
    decoder: Decoder, tokenizer: text.Tokenizer, batch_size: int
) -> None:
    found = evaluate.log_likelihoods(decoder, tokenizer, TEXTS, batch_size=batch_size)
    expected = [naive_log_likelihood(decoder, tokenizer.encode(t)) if t else 0.0 for t in TEXTS]
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_a_text_longer_than_the_model_is_an_error(decoder: Decoder, tokenizer: text.Tokenizer) -> None:
    with pytest.raises(DataError, match="longer than the model's 128"):
        evaluate.log_likelihoods(decoder, tokenizer, ["word " * 500])


class CountingDecoder:
    """Finds each token as likely as its id is small, whatever stands before it."""

    shape = SimpleNamespace(max_positions=128)
    training = False
    head_weight = torch.zeros(1)

    def eval(self) -> None: ...
    def train(self, mode: bool) -> None: ...

    def loss(self, ids_BT: torch.Tensor, labels_BT: torch.Tensor, *_: Any, reduction: str) -> torch.Tensor:
        assert reduction == "none"
        return labels_BT.clamp_min(0).flatten().float()


class Letters:
    """One token a letter: a is 1."""

    def encode_prompt(self, text: str) -> list[int]:
        return [ord(c) - 96 for c in text]


def test_probe_counts_by_kind_and_a_tie_is_not_right() -> None:
    items = [
        evaluate.ProbeItem("one", "x", ("ab", "az")),
        evaluate.ProbeItem("one", "x", ("az", "ab")),
        evaluate.ProbeItem("two", "", ("aa", "ab")),
        evaluate.ProbeItem("two", "", ("ab", "ab")),
        evaluate.ProbeItem("two", "", ("ab", "ac", "aa")),
        evaluate.ProbeItem("two", "", ("ab", "ac", "ad")),
    ]
    scores = evaluate.probe(CountingDecoder(), Letters(), items, batch_size=3)  # type: ignore[arg-type]
    assert scores == {"one": 0.5, "two": 0.5}


def test_the_probe_runs(decoder: Decoder, tokenizer: text.Tokenizer) -> None:
    items = evaluate.probe_items()
    scores = evaluate.probe(decoder, tokenizer, items)
    assert set(scores) == {item.kind for item in items}
    assert all(0 <= score <= 1 for score in scores.values())


def test_exact_answers_counts_and_keeps_examples() -> None:
    problems = starter.math_problems(0, 30)
    answers = {p.prompt: p.answer for p in problems}

    def complete(prompts: list[str]) -> list[str]:
        return [f" So.\nAnswer: {answers[p] if i % 2 else 'x'}" for i, p in enumerate(prompts)]

    result = evaluate.exact_answers(complete, problems, starter.check, num_examples=11)
    assert (result.exact, result.total) == (15, 30)
    assert result.right == [bool(i % 2) for i in range(30)]
    assert sum(right for right, _ in result.by_topic.values()) == 15
    assert sum(total for _, total in result.by_topic.values()) == 30
    assert len(result.examples) == 11
    assert len({e.topic for e in result.examples[:9]}) == 9
    first = result.examples[0]
    assert (first.prompt, first.right) == (problems[0].prompt, False)


def test_exact_answers_without_problems() -> None:
    result = evaluate.exact_answers(lambda prompts: prompts, [], starter.check)
    assert (result.exact, result.total, result.by_topic, result.examples) == (0, 0, {}, [])


def test_the_package_imports_no_torch_and_names_stay_functions() -> None:
    code = (
        "import sys, trimtab.evaluate as e; assert 'torch' not in sys.modules;"
        "import trimtab.evaluate.perplexity, trimtab.evaluate.likelihood; assert callable(e.loss) and callable(e.probe)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
