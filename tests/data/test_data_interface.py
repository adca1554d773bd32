"""Cached and streamed corpora and loaders have one interface."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trimtab.data import Corpus, Loader, eval_batches, highlight_example, make_loader, open_corpus
from trimtab.data.interface import LoaderFacts

T = 64


@pytest.fixture(params=[False, True], ids=["cached", "streamed"])
def corpus(request: pytest.FixtureRequest, tmp_path: Path, tokenizer: Any, corpus_folder: Path) -> Corpus:
    return open_corpus(
        str(corpus_folder), tokenizer, cache_dir=tmp_path / "cache", num_proc=1, streaming=request.param
    )


def test_corpora_have_one_interface(corpus: Corpus, tokenizer: Any) -> None:
    assert isinstance(corpus, Corpus)
    assert corpus.summary.files == len(corpus.source.files) == len(corpus.stamps)
    assert (corpus.display_name, corpus.form) == (corpus.name, None)
    corpus.check(json.loads(json.dumps(corpus.manifest())))
    train, heldout = corpus.split(share=0.2)
    assert type(train) is type(heldout) is type(corpus)
    batches = eval_batches(heldout, batch_size=2, max_seq_length=T, max_sequences=3)
    assert (len(batches), batches.num_sequences) == (2, 3)
    piece, cut = corpus.piece(0, T)
    assert highlight_example(corpus, tokenizer, max_seq_length=T)["tokens"] == len(piece.ids)
    assert cut == (len(piece.ids) == T)


def test_loaders_have_one_interface(corpus: Corpus) -> None:
    loader = make_loader([corpus], max_seq_length=T, batch_size=2)
    assert isinstance(loader, Loader)
    known = None if corpus.streaming else loader.fill
    share = loader.facts.attended_share
    assert loader.facts == LoaderFacts(loader.num_sequences, loader.num_tokens, known, share)
    assert share is None if corpus.streaming else 0 < share <= 1
    assert (loader.num_sequences is None) == (loader.steps_per_epoch is None) == corpus.streaming
    assert loader.notes() == []
    loader.next_step()
    position = json.loads(json.dumps(loader.position()))
    wanted = loader.next_step()[0].input_ids_BT.tolist()
    loader.restore(position)
    assert loader.next_step()[0].input_ids_BT.tolist() == wanted
    assert 0 < loader.epoch < 1
    loader.close()
    loader.close()
