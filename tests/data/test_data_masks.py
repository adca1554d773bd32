"""Loss masks from the cache to the batch: packing, truncation, streaming and restoring keep them correct."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_templates import CHATML, CHATML_MARKED, LLAMA3, TOOL_THINKING, TOOLS, chat_tokenizer
from data_rows import ANSWERED, ASKED, epoch_of, opened, pieces, write
from hypothesis import given
from hypothesis import strategies as st

from trimtab.data import (
    CachedCorpus,
    SourceSpec,
    eval_batches,
    highlight_example,
    make_loader,
    open_corpus,
    spec,
)
from trimtab.data.batch import collate
from trimtab.data.interface import Progress
from trimtab.data.packing import Piece, pack_documents
from trimtab.facts.errors import DataError
from trimtab.text.tokenizer import Tokenizer

T = 48


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations of every length; some lose their end at T tokens, some their only answer, some have none."""
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    draw = np.random.default_rng(5)
    rows = []
    for i in range(240):
        messages = []
        for turn in range(int(draw.integers(1, 4))):
            words = " ".join(["two"] * int(draw.integers(1, 30)))
            messages.append({"role": "user", "content": f"What is {i} plus {words}?"})
            if i % 17 or turn:
                messages.append({"role": "assistant", "content": f"It is {i}, " * int(draw.integers(1, 5))})
        rows.append({"messages": messages})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def corpus(chats: Path, chatml: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> CachedCorpus:
    return open_corpus(str(chats), chatml, cache_dir=tmp_path_factory.mktemp("cache"), num_proc=1)


@pytest.mark.parametrize("packing", [True, False])
def test_labels_are_the_answers_truncated_to_the_sequence(corpus: CachedCorpus, packing: bool) -> None:
    loader = make_loader([corpus], max_seq_length=T, batch_size=4, packing=packing)
    found = {origin: (ids, labels) for origin, ids, labels in epoch_of(loader)}
    kept = 0
    for document in range(corpus.num_documents):
        ids, mask = corpus.tokens(document).tolist()[:T], corpus.trained(document)
        assert mask is not None
        expected = [t if flag else -100 for t, flag in zip(ids[1:], mask[1:T], strict=True)] + [-100]
        if set(expected) == {-100}:
            assert corpus.origin(document) not in found
            continue
        kept += 1
        assert found[corpus.origin(document)] == (tuple(ids), tuple(expected))
    assert kept == len(found) < corpus.num_documents
    assert corpus.summary.untrained > 0


def test_truncated_examples_are_counted_and_reported(corpus: CachedCorpus) -> None:
    loader = make_loader([corpus], max_seq_length=T, batch_size=4)
    packed = loader.packed[0]  # type: ignore[union-attr]
    lengths = corpus.lengths_N
    lost = sum(not corpus.trained(d)[1:T].any() for d in range(corpus.num_documents))  # type: ignore[index]
    assert (packed.cut, packed.lost) == (int((lengths > T).sum()), lost)
    assert lost > 0
    (note,) = loader.notes()
    assert note.startswith(f"{corpus.name}: {packed.cut} examples are longer than max_seq_length (48)")
    assert f"; {lost} of them have nothing to train on before that point and are left out" in note
    assert not make_loader([corpus], max_seq_length=4096, batch_size=4).notes()
    with pytest.raises(
        DataError, match=r"all \d+ examples of .* within max_seq_length \(4 tokens\); raise max_seq_length"
    ):
        make_loader([corpus], max_seq_length=4, batch_size=4)


def test_targets_are_counted_for_each_step(corpus: CachedCorpus) -> None:
    loader = make_loader([corpus], max_seq_length=T, batch_size=3, accumulation=2)
    for _ in range(loader.steps_per_epoch or 0):
        for batch in loader.next_step():
            assert batch.num_targets == int((batch.labels_BT != -100).sum())
            if batch.origins[0]:
                assert all((row != -100).any() for row in batch.labels_BT), (
                    "every sequence has something to learn"
                )


@pytest.mark.parametrize("packing", [True, False])
def test_a_stream_and_the_cache_have_the_same_examples(
    chats: Path, corpus: CachedCorpus, chatml: Tokenizer, packing: bool
) -> None:
    reports: list[Progress] = []
    stream = open_corpus(str(chats), chatml, streaming=True, num_proc=1, progress=reports.append)
    cached = make_loader([corpus], max_seq_length=T, batch_size=4, packing=packing)
    streamed = make_loader([stream], max_seq_length=T, batch_size=4, packing=packing)
    expected = Counter(epoch_of(cached))
    assert Counter(epoch_of(streamed)) == expected
    messages = [note.message for note in reports if note.message]
    assert any("have nothing to train on before that point" in text for text in messages if text)
    assert any("without a token to train on" in text for text in messages if text)
    streamed.close()
    assert highlight_example(stream, chatml, max_seq_length=T) == highlight_example(
        corpus, chatml, max_seq_length=T
    )


def test_a_closed_stream_reports_what_it_left_out(chats: Path, chatml: Tokenizer) -> None:
    reports: list[Progress] = []
    stream = open_corpus(str(chats), chatml, streaming=True, num_proc=1, progress=reports.append)
    loader = make_loader([stream], max_seq_length=T, batch_size=4)
    loader.next_step()
    assert not any(note.message for note in reports)
    loader.close()
    assert any("examples are longer than max_seq_length (48)" in (note.message or "") for note in reports)


def test_a_stream_without_anything_to_train_on_is_refused(tmp_path: Path, chatml: Tokenizer) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "Hi"}]}) + "\n")
    stream = open_corpus(str(path), chatml, streaming=True, num_proc=1)
    loader = make_loader([stream], max_seq_length=T, batch_size=1)
    with pytest.raises(DataError, match=r"contains nothing to train on: 1 without a token to train on"):
        loader.next_step()
    loader.close()


LONG = {"role": "user", "content": "far too much before the answer " * 20}
NOTHING = {
    "no answer": (
        [{"role": "user", "content": "Hi"}],
        r"a.jsonl contains nothing to train on: 12 without a token",
    ),
    "too far": (
        [LONG, {"role": "assistant", "content": "Yes."}],
        r"all 12 examples of .* within max_seq_length \(48 tokens\); raise",
    ),
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("case", NOTHING)
def test_a_preview_without_anything_to_train_on_is_refused(
    tmp_path: Path, chatml: Tokenizer, case: str, streaming: bool
) -> None:
    messages, complaint = NOTHING[case]
    path = tmp_path / "a.jsonl"
    path.write_text((json.dumps({"messages": messages}) + "\n") * 12)
    with pytest.raises(DataError, match=complaint):
        highlight_example(
            open_corpus(str(path), chatml, streaming=streaming, num_proc=1, cache_dir=tmp_path / "cache"),
            chatml,
            max_seq_length=T,
        )


@pytest.mark.parametrize("case", NOTHING)
def test_a_stream_skips_examples_without_anything_to_train_on(
    tmp_path: Path, chatml: Tokenizer, case: str
) -> None:
    good = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho."}]
    path = tmp_path / "a.jsonl"
    rows = [NOTHING[case][0]] * 12 + [good] * 3
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in rows))
    stream = open_corpus(str(path), chatml, streaming=True, num_proc=1)
    assert highlight_example(stream, chatml, max_seq_length=T)["origin"] == "a.jsonl:13"
    with pytest.raises(IndexError):
        highlight_example(stream, chatml, max_seq_length=T, number=3)
    loader = make_loader([stream], max_seq_length=T, batch_size=4, packing=False)
    for _ in range(3):
        (batch,) = loader.next_step()
        assert [origin for sequence in batch.origins for origin in sequence].count("a.jsonl:14") == 1
        assert batch.num_targets > 0
    loader.close()


@pytest.mark.parametrize("streaming", [False, True])
def test_restoring_anywhere_gives_the_same_rest(
    chats: Path, chatml: Tokenizer, streaming: bool, tmp_path: Path
) -> None:
    def loader() -> Any:
        opened = open_corpus(str(chats), chatml, cache_dir=tmp_path, num_proc=1, streaming=streaming)
        return make_loader([opened], max_seq_length=T, batch_size=2, accumulation=2, seed=4)

    first, positions, seen = loader(), [], []
    for _ in range(60):
        positions.append(json.dumps(first.position()))
        seen.append([piece for batch in first.next_step() for piece in pieces(batch)])
    assert first.epoch > 1
    again = loader()
    for start in (0, 1, 7, 30, 59):
        again.restore(json.loads(positions[start]))
        assert [piece for batch in again.next_step() for piece in pieces(batch)] == seen[start]
    first.close(), again.close()


def test_settings_are_part_of_the_cache_key_and_of_a_position(
    chats: Path, tmp_path: Path, chatml: Tokenizer
) -> None:
    """Another template, choice of answers, column or variable is another entry, and no resume mixes the two."""

    def opened(given: Tokenizer, **spec: Any) -> CachedCorpus:
        return open_corpus(SourceSpec(str(chats), **spec), given, cache_dir=tmp_path, num_proc=1)

    first = opened(chatml)
    others = [
        opened(chatml, train_on="last"),
        opened(chatml, train_on="all"),
        opened(chatml, variables={"x": 1}),
        opened(chat_tokenizer(LLAMA3)),
        opened(chat_tokenizer(CHATML + "{# a remark #}")),
    ]
    assert len({corpus.entry.path for corpus in (first, *others)}) == 6
    assert opened(chatml).entry.path == first.entry.path
    place = make_loader([first], max_seq_length=T, batch_size=2).position()
    for other in others:
        with pytest.raises(DataError, match="has changed since the run began"):
            make_loader([other], max_seq_length=T, batch_size=2).restore(place)
    with pytest.raises(DataError, match="it is read with different settings"):
        others[0].check(first.manifest())


def test_the_cache_has_the_declared_size(corpus: CachedCorpus, chatml: Tokenizer) -> None:
    files = [corpus.entry.path / f"{name}.bin" for name in ("tokens", "documents", "trained")]
    declared = spec.cache_bytes(corpus.num_tokens, corpus.num_documents, chatml.vocab_size, masked=True)
    assert sum(file.stat().st_size for file in files) == declared


def test_a_damaged_mask_is_detected_and_rebuilt(chats: Path, tmp_path: Path, chatml: Tokenizer) -> None:
    reports: list[Progress] = []

    def opened() -> CachedCorpus:
        return open_corpus(str(chats), chatml, cache_dir=tmp_path, num_proc=1, progress=reports.append)

    path = opened().entry.path / "trained.bin"
    good = path.read_bytes()
    for damaged in (good[:-1], bytes([1 - good[0]]) + good[1:]):
        path.unlink()
        path.write_bytes(damaged)
        reports.clear()
        corpus = opened()
        assert any("damaged" in (note.message or "") for note in reports)
        assert corpus.entry.trained is not None
        assert corpus.entry.trained.tobytes() == good


def test_held_out_conversations_are_measured_on_their_answers(corpus: CachedCorpus) -> None:
    train, heldout = corpus.split(share=0.2)
    assert train.num_documents + heldout.num_documents == corpus.num_documents
    batches = eval_batches(heldout, batch_size=4, max_seq_length=4096)
    found = {piece[0]: piece for batch in batches for piece in pieces(batch)}
    assert len(found) == heldout.num_documents
    assert sum(batch.num_targets for batch in batches) == sum(
        int(heldout.trained(d)[1:].sum())  # type: ignore[index]
        for d in range(heldout.num_documents)
    )
    single = corpus._view(np.arange(corpus.num_documents) == 3, "single")
    with pytest.raises(
        DataError, match=r"contains one example, which cannot be split to hold out a part; .*eval_share: 0"
    ):
        single.split(share=0.5)


lengths_and_masks = st.lists(
    st.integers(2, 40).flatmap(
        lambda n: st.tuples(st.just(n), st.lists(st.integers(0, 1), min_size=n, max_size=n))
    ),
    min_size=1,
    max_size=30,
)


@given(lengths_and_masks, st.integers(4, 24), st.booleans())
def test_packed_examples_lose_no_label_and_gain_none(
    drawn: list[tuple[int, list[int]]], sequence: int, packing: bool
) -> None:
    """Every kept example is in one sequence, from its beginning, complete or truncated; labels stay inside examples."""
    masks = [np.array(mask, np.uint8) for _, mask in drawn]
    ids = [np.arange(1000 * d, 1000 * d + n) for d, (n, _) in enumerate(drawn)]
    keep_N = np.array([mask[1:sequence].any() for mask in masks])
    packed = pack_documents(np.array([n for n, _ in drawn]), sequence, packing, keep_N=keep_N)
    sequences = []
    for w in range(packed.num_sequences):
        parts = []
        for p in packed.sequence(w).tolist():
            d, n = int(packed.pieces.document_P[p]), int(packed.pieces.length_P[p])
            assert packed.pieces.start_P[p] == 0
            assert n == min(sequence, len(ids[d]))
            parts.append(Piece(ids[d][:n], f"f:{d}", masks[d][:n]))
        sequences.append(parts)
    used = sorted(int(piece.ids[0]) // 1000 for parts in sequences for piece in parts)
    assert used == np.flatnonzero(keep_N).tolist()
    assert packed.dropped == sum(len(i) for i in ids) - sum(len(p.ids) for w in sequences for p in w)
    if not sequences:
        return
    batch = collate(sequences, sequence)
    labels = sorted(batch.labels_BT[batch.labels_BT != -100].tolist())
    expected = [int(i) for d in used for i in ids[d][1:sequence][masks[d][1:sequence] == 1]]
    assert labels == sorted(expected)
    assert batch.num_targets == len(expected)
    inputs, shifted = batch.input_ids_BT[:, 1:], batch.labels_BT[:, :-1]
    assert (inputs[shifted != -100] == shifted[shifted != -100]).all()


@pytest.mark.parametrize("template", [CHATML, None], ids=["template", "plain"])
@pytest.mark.parametrize("answer", [None, ""], ids=["null", "empty"])
@pytest.mark.parametrize(
    "row",
    [
        {"instruction": "Add.", "input": "2, 2", "output": "4"},
        {"instruction": "Add.", "output": "4"},
        {"prompt": "Add.", "completion": "4"},
    ],
    ids=["alpaca", "alpaca without input", "prompt-completion"],
)
def test_an_output_that_is_empty_or_null_is_no_answer(
    tmp_path: Path, row: dict[str, Any], answer: str | None, template: str | None
) -> None:
    """A model must not learn to give empty answers."""
    tokenizer = chat_tokenizer(template)
    unanswered = {**row, list(row)[-1]: answer}
    path = write(tmp_path / "a.jsonl", [row, unanswered, unanswered])
    summary = opened(path, tokenizer).summary
    assert (summary.documents, summary.untrained) == (1, 2)
    assert opened(path, tokenizer, train_on="all").summary.documents == 3
    with pytest.raises(DataError, match="nothing to train on: 2 without a token to train on"):
        opened(write(tmp_path / "b.jsonl", [unanswered] * 2), tokenizer)


SILENT = {"role": "assistant", "content": ""}
NO_ANSWERS: dict[str, dict[str, Any]] = {
    "completion": {"prompt": [ASKED], "completion": ""},
    "completion of messages": {"prompt": [ASKED], "completion": [SILENT]},
    "completion after an answer": {"prompt": [ASKED, ANSWERED, ASKED], "completion": [SILENT]},
    "completion to a text": {"prompt": "Add.", "completion": [SILENT]},
    "messages": {"messages": [ASKED, SILENT]},
    "messages, named": {"messages": [ASKED, {**SILENT, "name": "bot", "reasoning_content": ""}]},
    "messages, twice": {"messages": [ASKED, SILENT, ASKED, SILENT]},
    "messages, context": {"messages": [ASKED, SILENT, ASKED, {**ANSWERED, "weight": 0}]},
    "messages, null": {"messages": [ASKED, {**SILENT, "content": None}]},
    "messages, null twice": {"messages": [{**ASKED, "content": None}, {**SILENT, "content": None}]},
    "messages, parts": {"messages": [ASKED, {**SILENT, "content": []}]},
    "sharegpt": {"conversations": [{"from": "human", "value": "Add."}, {"from": "gpt", "value": ""}]},
    "sharegpt, null": {"conversations": [{"from": "human", "value": "Add."}, {"from": "gpt", "value": None}]},
}


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED, LLAMA3], ids=["chatml", "marked", "llama3"])
@pytest.mark.parametrize("case", NO_ANSWERS)
def test_a_conversation_of_empty_answers_has_nothing_to_train_on(
    tmp_path: Path, case: str, template: str
) -> None:
    """Like a plain prompt with an empty completion."""
    tokenizer, row = chat_tokenizer(template), NO_ANSWERS[case]
    with pytest.raises(DataError, match="nothing to train on: 2 without a token to train on"):
        opened(write(tmp_path / "a.jsonl", [row] * 2), tokenizer)
    assert opened(tmp_path / "a.jsonl", tokenizer, train_on="all").summary.documents == 2


@pytest.mark.parametrize("train_on", ["completions", "last"])
@pytest.mark.parametrize(
    "row",
    [
        {"messages": [ASKED, ANSWERED, ASKED, SILENT]},
        {"prompt": [ASKED], "completion": [ANSWERED, ASKED, SILENT]},
    ],
    ids=["messages", "prompt-completion"],
)
def test_an_empty_answer_at_the_end_is_left_out_with_its_question(
    tmp_path: Path, chatml: Tokenizer, row: dict[str, Any], train_on: Any
) -> None:
    corpus = opened(write(tmp_path / "a.jsonl", [row]), chatml, train_on=train_on)
    assert (corpus.summary.unanswered, corpus.summary.untrained) == (1, 0)
    shown = highlight_example(corpus, chatml)["runs"]
    assert [text for text, trained in shown if trained] == ["4<|im_end|>"]
    assert shown[-1] == ("\n", False)


@pytest.mark.parametrize(
    ("template", "answer"),
    [
        (CHATML, {"content": " "}),
        (TOOL_THINKING, {"content": "", "reasoning_content": "Hm."}),
        (TOOLS, {"content": "", "tool_calls": [{"function": {"name": "add"}}]}),
    ],
    ids=["white space", "thinking", "a call"],
)
def test_an_answer_without_text_is_still_an_answer(
    tmp_path: Path, template: str, answer: dict[str, Any]
) -> None:
    row = {"messages": [ASKED, {"role": "assistant", **answer}]}
    assert opened(write(tmp_path / "a.jsonl", [row]), chat_tokenizer(template)).summary.documents == 1
