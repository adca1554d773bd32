"""Streaming yields the same sequences as the cache and restores exactly at any step."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from data_rows import assert_numbered

from trimtab.data import SourceSpec, eval_batches, make_loader, open_corpus, readers, spec, stream_sequences
from trimtab.data.batch import Batch
from trimtab.facts.errors import DataError

T = 64


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunks and cut documents in a small corpus."""
    from trimtab.data import packing

    for module in (packing, stream_sequences):
        monkeypatch.setattr(module, "chunk_tokens", lambda _: 900)
        monkeypatch.setattr(module, "CHUNK_PIECES", 17)
    monkeypatch.setattr(readers, "SEGMENT_CHARS", 300)


def rows(batches: list[Batch]) -> list[tuple]:
    return [
        tuple(torch.cat([b.input_ids_BT[i], b.labels_BT[i]]).tolist())
        for b in batches
        for i in range(len(b.origins))
        if b.origins[i]
    ]


def stream_loader(folder: Path, tokenizer, replay: Path | None = None, **changes):
    given = {"max_seq_length": T, "batch_size": 4, "accumulation": 2, "seed": 3, **changes}
    train = [open_corpus(str(folder), tokenizer, streaming=True, num_proc=1)]
    others = [open_corpus(str(replay), tokenizer, streaming=True, num_proc=1)] if replay else []
    return make_loader(train, replay=others, replay_share=0.2 if replay else 0.0, **given)


def epoch_of(loader) -> list[list[tuple]]:
    start, found = int(loader.epoch), []
    while int(loader.epoch) == start:
        found.append(rows(loader.next_step()))
    return found


@pytest.mark.parametrize("packing", [True, False])
def test_a_pass_has_the_same_sequences_as_the_cache(
    packing: bool, corpus_folder: Path, tokenizer, tmp_path: Path
) -> None:
    streamed = stream_loader(corpus_folder, tokenizer, packing=packing)
    cached = make_loader(
        [open_corpus(str(corpus_folder), tokenizer, cache_dir=tmp_path)],
        max_seq_length=T,
        batch_size=8,
        packing=packing,
    )
    expected = Counter(row for _ in range(cached.steps_per_epoch) for row in rows(cached.next_step()))
    for _ in range(2):
        assert Counter(row for step in epoch_of(streamed) for row in step) == expected
    assert streamed.num_sequences is None
    assert streamed.fill == pytest.approx(cached.fill, rel=0.01)
    streamed.close()


def test_epochs_have_their_own_order_and_never_an_empty_step(corpus_folder: Path, tokenizer) -> None:
    loader = stream_loader(corpus_folder, tokenizer)
    first, second = epoch_of(loader), epoch_of(loader)
    assert all(first + second)
    assert [len(step) for step in first[:-1]] == [8] * (len(first) - 1)
    assert first != second
    assert loader.epoch == 2.0
    again = stream_loader(corpus_folder, tokenizer)
    assert epoch_of(again) == first
    loader.close(), again.close()


def test_restoring_anywhere_gives_the_same_rest(corpus_folder: Path, replay_folder: Path, tokenizer) -> None:
    loader = stream_loader(corpus_folder, tokenizer, replay_folder)
    positions, seen = [], []
    while loader.epoch < 2.3:
        positions.append(json.dumps(loader.position()))
        seen.append(rows(loader.next_step()))
    assert len(seen) > 40
    fresh = stream_loader(corpus_folder, tokenizer, replay_folder)
    for start in range(0, len(seen), 3):
        fresh.restore(json.loads(positions[start]))
        assert rows(fresh.next_step()) == seen[start]
    fresh.restore(json.loads(positions[7]))
    assert [rows(fresh.next_step()) for _ in seen[7:]] == seen[7:]
    loader.close(), fresh.close()


def test_ranks_and_batches_share_a_stream(corpus_folder: Path, replay_folder: Path, tokenizer) -> None:
    alone = stream_loader(corpus_folder, tokenizer, replay_folder)
    ranks = [
        stream_loader(corpus_folder, tokenizer, replay_folder, batch_size=1, dp_rank=r, dp_size=4)
        for r in range(4)
    ]
    while alone.epoch < 1:
        parts = [rank.next_step() for rank in ranks]
        assert [row for part in parts for row in rows(part)] == rows(alone.next_step())
        assert len({len(part) for part in parts}) == 1
        assert_numbered(parts)
    for loader in [alone, *ranks]:
        loader.close()


def test_replay_has_its_share_and_starts_over(corpus_folder: Path, replay_folder: Path, tokenizer) -> None:
    loader = stream_loader(corpus_folder, tokenizer, replay_folder)
    flags = []
    while loader.epoch < 3:
        flags += [o[0].startswith("general") for batch in loader.next_step() for o in batch.origins]
    running = np.cumsum(flags) - 0.2 * np.arange(1, len(flags) + 1)
    assert np.abs(running).max() <= 1
    assert loader.position()["streams"][1]["pass"] >= 1, (
        "the replay source should have been read more than once"
    )
    loader.close()


def test_held_out_documents_are_the_same_as_in_the_cache(
    corpus_folder: Path, tokenizer, tmp_path: Path
) -> None:
    streams = open_corpus(str(corpus_folder), tokenizer, streaming=True, num_proc=1).split(share=0.2)
    cached = open_corpus(str(corpus_folder), tokenizer, cache_dir=tmp_path).split(share=0.2)
    for stream, corpus in zip(streams, cached, strict=True):
        batches = eval_batches(stream, batch_size=4, max_seq_length=T)
        origins = {origin for batch in batches for sequence in batch.origins for origin in sequence}
        assert origins == {corpus.origin(i) for i in range(corpus.num_documents)}
    train, heldout = streams[0], cached[1]
    assert train.without(heldout).fingerprint != train.fingerprint
    everything = open_corpus(str(corpus_folder), tokenizer, streaming=True, num_proc=1).without(heldout)
    batches = eval_batches(everything, batch_size=4, max_seq_length=T)
    seen = {origin for batch in batches for sequence in batch.origins for origin in sequence}
    assert seen == {cached[0].origin(i) for i in range(cached[0].num_documents)}
    assert len(eval_batches(streams[1], batch_size=4, max_seq_length=T, max_sequences=5)) == 2


def test_two_sources_end_together(corpus_folder: Path, replay_folder: Path, tokenizer) -> None:
    corpora = [
        open_corpus(str(f), tokenizer, streaming=True, num_proc=1) for f in (corpus_folder, replay_folder)
    ]
    loader = make_loader(corpora, max_seq_length=T, batch_size=8)
    seen: list[bool] = []
    while loader.epoch < 1:
        seen += [o[0].startswith("general") for batch in loader.next_step() for o in batch.origins]
    last = max(i for i, general in enumerate(seen) if general), max(i for i, g in enumerate(seen) if not g)
    assert min(last) > 0.85 * len(seen)
    loader.close()


def test_first_counts_rows_across_a_restore(corpus_folder: Path, tokenizer) -> None:
    def loader():
        source = SourceSpec(str(corpus_folder), first=70)
        corpus = open_corpus(source, tokenizer, streaming=True, num_proc=1)
        return make_loader([corpus], max_seq_length=T, batch_size=8)

    def rest(loader) -> set[str]:
        seen = set()
        while loader.epoch < 1:
            seen |= {o for batch in loader.next_step() for sequence in batch.origins for o in sequence}
        return seen

    first, second = loader(), loader()
    for _ in range(5):
        first.next_step()
    second.restore(first.position())
    assert rest(first) == rest(second)
    whole = loader()
    assert len(rest(whole)) == 70
    for opened in (first, second, whole):
        opened.close()


def test_what_a_stream_cannot_do_is_an_error(corpus_folder: Path, tokenizer, tmp_path: Path) -> None:
    corpus = open_corpus(str(corpus_folder), tokenizer, streaming=True)
    cached = open_corpus(str(corpus_folder), tokenizer, cache_dir=tmp_path)
    with pytest.raises(
        DataError, match=r"has the weight 2.0.*leave the weight at 1, or set data.streaming: false"
    ):
        make_loader([(corpus, 2.0)], max_seq_length=T, batch_size=1)
    with pytest.raises(DataError, match=r"some sources are streamed"):
        make_loader([corpus, cached], max_seq_length=T, batch_size=1)
    with pytest.raises(DataError, match=r"needs the cached mode; give a share"):
        corpus.split(count=3)
    (tmp_path / "blank.txt").write_text("\n\n\n")
    empty = make_loader(
        [open_corpus(str(tmp_path / "blank.txt"), tokenizer, streaming=True)], max_seq_length=T, batch_size=1
    )
    with pytest.raises(DataError, match=r"contains no documents"):
        empty.next_step()
    empty.close()


def test_errors_of_files_reach_the_loader(tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    corpus = open_corpus(str(tmp_path / "a.jsonl"), tokenizer, streaming=True, num_proc=1)
    loader = make_loader([corpus], max_seq_length=T, batch_size=1)
    with pytest.raises(DataError, match=r"a\.jsonl:2 is not JSON"):
        loader.next_step()
    loader.close()


def test_changed_files_are_detected(tokenizer, tmp_path: Path, prose) -> None:
    (tmp_path / "a.txt").write_text(prose(0, 50))
    before = open_corpus(str(tmp_path / "a.txt"), tokenizer, streaming=True)
    (tmp_path / "a.txt").write_text(prose(1, 50))
    after = open_corpus(str(tmp_path / "a.txt"), tokenizer, streaming=True)
    with pytest.raises(DataError, match=r"changed: a\.txt"):
        after.check(before.manifest())
    loaders = [make_loader([c], max_seq_length=T, batch_size=1) for c in (before, after)]
    with pytest.raises(DataError, match=r"a\.txt has changed since the run began"):
        loaders[1].restore(loaders[0].position())
    for loader in loaders:
        loader.close()


def test_costs_are_declared_without_torch() -> None:
    assert spec.batch_bytes(2, T) == sum(t.numel() * t.element_size() for t in _tensors(make_batch()))


def make_batch() -> Batch:
    from trimtab.data.batch import collate
    from trimtab.data.packing import Piece

    return collate([[Piece(np.arange(5), "a:1")], [Piece(np.arange(7), "a:2")]], T)


def _tensors(batch: Batch) -> list[torch.Tensor]:
    return [batch.input_ids_BT, batch.labels_BT, batch.positions_BT, batch.documents_BT]
