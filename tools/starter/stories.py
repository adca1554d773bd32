"""General documents: stories, facts, scenes, questions and talk, from seeds; held-out ones are never trained on.

A document is a pure function of (seed, split, index), so that any process can write any part of a corpus.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

from tools.starter.general.asking import asking
from tools.starter.general.exposition import exposition
from tools.starter.general.pictures import picture
from tools.starter.general.reasoning import short_texts
from tools.starter.general.tell import story
from tools.starter.probe import held_out_phrases
from trimtab.facts.errors import DataError
from trimtab.facts.randomness import derive

SPLITS = ("train", "heldout")
# Shares of the documents, added up.
KINDS: tuple[tuple[float, Callable[[random.Random], str]], ...] = (
    (0.50, story), (0.61, exposition), (0.82, picture), (0.88, asking), (1.0, short_texts),
)  # fmt: skip


def general_document(seed: int, index: int, split: str = "train") -> str:
    """One document: half are stories, the rest facts, scenes, questions, small reasoning and talk.

    A text that contains a phrase of the probe is replaced by another draw, so that no item of the probe is trained on.
    """
    if split not in SPLITS:
        raise DataError(
            f"there is no split {split!r} of the starter's text", f"use one of {', '.join(SPLITS)}"
        )
    rng = random.Random(derive(seed, "general", split, index))
    share = rng.random()
    write = next(kind for limit, kind in KINDS if share < limit)
    phrases = held_out_phrases()
    while True:
        text = write(rng)
        if not any(phrase in text for phrase in phrases):
            return text


def general_documents(seed: int, count: int, split: str = "train", start: int = 0) -> Iterator[str]:
    """Yield `count` documents from index `start`.

    Held-out documents have other seeds. Documents differ between the splits (short ones may repeat; `corpora` removes
    those), but their sentences come from the same grammar: this split measures the learned style, the public-domain
    pages measure generalization.

    Example:
        >>> len(list(general_documents(0, 3)))
        3
    """
    for index in range(start, start + count):
        yield general_document(seed, index, split)
