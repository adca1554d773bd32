"""Streaming never shows half a character, and long texts cut into pieces keep their tokens."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from text_fixtures import CORPUS, byte_level_backend, write_folder
from tokenizers import normalizers

from trimtab import text
from trimtab.text import long_text
from trimtab.text.pretokenizers import SPLIT_RULES
from trimtab.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return text.load(write_folder(tmp_path_factory.mktemp("tokenizer"), byte_level_backend(280)))


def test_a_character_of_several_tokens_comes_whole(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🙂b")
    assert len(ids) > 3, "the smile must take several tokens for this test to mean anything"
    stream = text.Detokenizer(tokenizer)
    pieces = [stream.push(i) for i in ids]
    assert "🙂" in pieces
    assert "".join(pieces) == "a🙂b"
    assert stream.finish() == ""


def test_an_unfinished_character_shows_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🙂")[:-1]
    stream = text.Detokenizer(tokenizer)
    assert [stream.push(i) for i in ids] == [""] * len(ids)
    assert stream.finish() == tokenizer.decode(ids)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 279), max_size=30))
def test_pieces_add_up_for_any_ids(tokenizer: Tokenizer, ids: list[int]) -> None:
    stream = text.Detokenizer(tokenizer)
    assert "".join(stream.push(i) for i in ids) + stream.finish() == tokenizer.decode(ids)


@settings(max_examples=100, deadline=None)
@given(sample=st.text(max_size=40))
def test_round_trip_and_streaming_for_any_text(tokenizer: Tokenizer, sample: str) -> None:
    ids = tokenizer.encode(sample)
    assert tokenizer.decode(ids, skip_special=False) == sample
    stream = text.Detokenizer(tokenizer, skip_special=False)
    assert "".join(stream.push(i) for i in ids) + stream.finish() == sample


WORDS = st.sampled_from(
    [*CORPUS, "word", " word", "\n", "\n\n", " ", "  ", "1", "23", "'s", "é", "e\u0301", "<s>", ".", "A"]
)


@pytest.mark.parametrize("cut", ["gpt-2", "smollm", "llama-bpe", "qwen2", "tekken", "gpt-4o"])
def test_long_texts_keep_their_tokens(cut: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = byte_level_backend(600)
    backend.pre_tokenizer = SPLIT_RULES[cut].pre_tokenizer()
    if cut == "qwen2":
        backend.normalizer = normalizers.NFC()
    monkeypatch.setattr(long_text, "PIECE_CHARS", 20)
    cutter, counts = long_text.LongText(backend), []

    @settings(max_examples=150, deadline=None)
    @given(words=st.lists(WORDS, min_size=5, max_size=40))
    def check(words: list[str]) -> None:
        sample = "".join(words)
        pieces = list(cutter.pieces(sample))
        counts.append(len(pieces))
        assert "".join(piece for _, piece in pieces) == sample
        apart = [part.encode(piece, add_special_tokens=False).ids for part, piece in pieces]
        whole = backend.encode(sample, add_special_tokens=False).ids
        assert list(itertools.chain.from_iterable(apart)) == whole

    check()
    assert max(counts) > 3, "texts must really be cut"


def test_encode_of_a_long_document_is_that_of_the_whole(tokenizer: Tokenizer) -> None:
    document = "".join(CORPUS) * 600
    assert len(document) > 3 * long_text.PIECE_CHARS
    whole = tokenizer.backend.encode(document, add_special_tokens=False).ids
    assert tokenizer.encode(document) == whole
    assert tokenizer.encode_batch(["Hi", document, "you"]) == [
        tokenizer.encode("Hi"),
        whole,
        tokenizer.encode("you"),
    ]
    assert len(list(tokenizer._long_text.pieces(document))) > 3


def test_added_tokens_that_reach_over_spaces_forbid_cutting(tokenizer: Tokenizer) -> None:
    backend = byte_level_backend(280)
    backend.add_tokens(["two words"])
    document = "two words " * 20_000
    assert len(list(long_text.LongText(backend).pieces(document))) == 1
    assert len(list(long_text.LongText(tokenizer.backend).pieces(document))) > 1
