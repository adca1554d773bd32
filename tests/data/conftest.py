"""A tiny real tokenizer and small corpora for the data tests."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from chat_templates import CHATML, chat_tokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from trimtab.text.tokenizer import Tokenizer

WORDS = """
the of and a to in is that it was for on are as with his they be at one have this from or had by hot but
some what there we can out other were all your when up use word how said an each she which do their time
""".split()  # noqa: SIM905  a list of fifty strings reads worse


def make_text(seed: int, num_words: int) -> str:
    """Sentences in lines and paragraphs."""
    draw = random.Random(seed)
    words = []
    for i in range(num_words):
        words.append(draw.choice(WORDS) + str(draw.randrange(100)) * (draw.random() < 0.1))
        if i % 11 == 10:
            words[-1] += ".\n\n" if draw.random() < 0.2 else ".\n" if draw.random() < 0.3 else "."
    return " ".join(words).replace("\n ", "\n")


@pytest.fixture(scope="session")
def prose() -> Callable[[int, int], str]:
    """`prose(seed, num_words)`: text made of common words."""
    return make_text


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Byte-level BPE with an end token and no beginning token."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([make_text(s, 500) for s in range(20)], trainer)
    return Tokenizer(backend, bos_id=None, eos_id=0, stop_ids=frozenset({0}))


@pytest.fixture(scope="session")
def chatml() -> Tokenizer:
    """A tokenizer with ChatML's markers and chat template."""
    return chat_tokenizer(CHATML)


@pytest.fixture(scope="session")
def spaced_tokenizer() -> Tokenizer:
    """A SentencePiece-like pipeline, which prepends a space to every text."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    backend.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False, max_token_length=6
    )
    lines = [line for s in range(20) for line in make_text(s, 500).split()]
    backend.train_from_iterator(lines, trainer)
    return Tokenizer(backend, bos_id=1, eos_id=2, stop_ids=frozenset({2}))


@pytest.fixture(scope="session")
def corpus_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three files of documents of very different lengths."""
    folder = tmp_path_factory.mktemp("corpus")
    draw = random.Random(7)
    for f in range(3):
        lengths = [max(3, int(draw.lognormvariate(3.5, 1.0))) for _ in range(60)]
        rows = [{"id": i, "text": make_text(1000 * f + i, n)} for i, n in enumerate(lengths)]
        (folder / f"part{f}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="session")
def replay_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few text files."""
    folder = tmp_path_factory.mktemp("replay")
    for f in range(12):
        (folder / f"general{f:02}.txt").write_text(make_text(90_000 + f, 70))
    return folder
