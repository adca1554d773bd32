"""Trains the starter's tokenizer: byte-level BPE of 4096 over stories, public-domain text and mathematics.

    python -m tools.starter.vocabulary CORPUS_FOLDER [OUT_FOLDER]

Each digit is a separate token (so that digits align in columns), words include their leading space as in GPT-2, and
every byte is in the vocabulary, so that any text can be encoded.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from tools.starter.corpora import SEED, read_lines
from trimtab.starter.files import HERE as STARTER
from trimtab.starter.math import math_documents

VOCABULARY = 4096
END = "<|endoftext|>"
BASE = STARTER / "base"
# GPT-2's pattern, but one digit at a time and no space before a digit.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train(documents: Iterator[str]) -> Tokenizer:
    """A tokenizer of 4096 entries, `<|endoftext|>` the first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    assert tokenizer.get_vocab_size() == VOCABULARY
    return tokenizer


def mix(corpus: Path) -> Iterator[str]:
    """A sample of the whole mix: all public-domain text, stories of about twice its size, mathematics."""
    yield from read_lines(corpus / "public.jsonl")
    yield from islice(read_lines(corpus / "stories-00.jsonl"), 20_000)
    yield from math_documents(SEED, 6_000)


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """`tokenizer.json` and `tokenizer_config.json` as transformers reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": END,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main(arguments: list[str] | None = None) -> None:
    """The command line above."""
    parser = argparse.ArgumentParser(
        "python -m tools.starter.vocabulary", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("corpus", type=Path, help="folder written by tools.starter.corpora")
    parser.add_argument("out", type=Path, nargs="?", default=BASE, help="folder of the base model")
    options = parser.parse_args(arguments)
    save(train(mix(options.corpus)), options.out)


if __name__ == "__main__":
    main()
