"""General documents: stories, facts, small reasoning and talk, from seeds; held-out ones never meet training.

A document is a pure function of (seed, split, index), so that any process can write any part of a corpus.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from trimtab.facts.errors import DataError
from trimtab.facts.randomness import derive
from trimtab.starter.general.exposition import exposition
from trimtab.starter.general.reasoning import short_texts
from trimtab.starter.general.tell import story

SPLITS = ("train", "heldout")


def general_document(seed: int, index: int, split: str = "train") -> str:
    """One document: two thirds stories, the rest facts, small reasoning, counting and conversations."""
    if split not in SPLITS:
        raise DataError(
            f"there is no split {split!r} of the starter's text", f"use one of {', '.join(SPLITS)}"
        )
    rng = random.Random(derive(seed, "general", split, index))
    kind = rng.random()
    if kind < 0.66:
        return story(rng)
    if kind < 0.80:
        return exposition(rng)
    return short_texts(rng)


def general_documents(seed: int, count: int, split: str = "train", start: int = 0) -> Iterator[str]:
    """`count` documents from `start` on.

    The held-out documents are drawn with other seeds. Whole texts do not repeat (short ones may: those are
    dropped by whoever holds both, as `corpora` does), but the sentences come from the same grammar: this
    split shows what was learned of the style, the public-domain pages show the rest.

    Example:
        >>> len(list(general_documents(0, 3)))
        3
    """
    for index in range(start, start + count):
        yield general_document(seed, index, split)
