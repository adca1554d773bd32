"""Bare number facts, a tenth of the base model's pretraining: sums and products, no solved problems.

A document is a list of facts, one per line:

    34 + 25 = 59
    56 / 8 = 7
    5, 10, 15, 20, 25
    47 = 4 tens and 7 ones

They contain no questions, worked solutions, algebra or calculus, which the demo teaches. Facts that answer a held-out
problem are excluded.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from trimtab.facts.randomness import derive
from trimtab.starter.math import worked
from trimtab.starter.mathematics.problem import WorkedProblem

SIGNS = {"addition": "+", "subtraction": "-", "multiplication": "×", "division": "/"}


def number_documents(seed: int, count: int, start: int = 0) -> Iterator[str]:
    """`count` documents from `start` on; each is a function of (seed, index) alone.

    Example:
        >>> len(next(number_documents(0, 1)).splitlines()) >= 8
        True
    """
    for index in range(start, start + count):
        rng = random.Random(derive(seed, "number-facts", index))
        kinds = rng.sample([*SIGNS, "sequence", "tens"], rng.randint(1, 4))
        yield "\n".join(_fact(rng.choice(kinds), rng) for _ in range(rng.randint(8, 24)))


def _fact(kind: str, rng: random.Random) -> str:
    if kind == "tens":
        number = rng.randint(10, 99)
        return f"{number} = {number // 10} tens and {number % 10} ones"
    found = worked(kind, rng, "train")
    if kind == "sequence":
        return ", ".join([*map(str, found.key), found.answer])
    return f"{_expression(found, rng)} = {found.answer}"


def _expression(found: WorkedProblem, rng: random.Random) -> str:
    first, second = found.key
    if found.topic == "addition" and rng.random() < 0.5:
        first, second = second, first
    return f"{first} {SIGNS[found.topic]} {second}"
