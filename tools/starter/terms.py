"""Numbers and terms to copy, a twelfth of the base model's pretraining: reading them, without arithmetic.

A document is a list of lines such as

    4x^2 + 7x: the first part is 4x^2, the second part is 7x.
    Take 34 and 8. The first is 34, the second is 8.
    The number after 41 is 42, the number before it is 40.

Nothing is solved in them. A model that cannot copy a number cannot learn mathematics.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from trimtab.facts.randomness import derive


def term_documents(seed: int, count: int, start: int = 0) -> Iterator[str]:
    """Yield `count` documents from index `start`; each depends only on (seed, index).

    Example:
        >>> len(next(term_documents(0, 1)).splitlines()) >= 4
        True
    """
    for index in range(start, start + count):
        rng = random.Random(derive(seed, "terms", index))
        lines = [rng.choice(_KINDS)(rng) for _ in range(rng.randint(4, 10))]
        yield "\n".join(lines)


def _number(rng: random.Random) -> int:
    return rng.randint(0, 9) if rng.random() < 0.4 else rng.randint(10, 99)


def _term(rng: random.Random) -> str:
    factor = "" if (number := rng.randint(1, 20)) == 1 else str(number)
    power = rng.randint(0, 5)
    return str(number) if power == 0 else f"{factor}x" if power == 1 else f"{factor}x^{power}"


def _sum(rng: random.Random) -> str:
    parts = [_term(rng) for _ in range(rng.choice((1, 2, 2, 3)))]
    ordinals = ("first", "second", "third")
    told = ", ".join(f"the {name} part is {part}" for name, part in zip(ordinals, parts, strict=False))
    return f"{' + '.join(parts)}: {told}."


def _pair(rng: random.Random) -> str:
    a, b = _number(rng), _number(rng)
    return rng.choice(
        (
            f"Take {a} and {b}. The first is {a}, the second is {b}.",
            f"{a}, {b}: first {a}, then {b}.",
            f"a = {a} and b = {b}. So b is {b} and a is {a}.",
        )
    )


def _neighbours(rng: random.Random) -> str:
    number = rng.randint(1, 98)
    return f"The number after {number} is {number + 1}, the number before it is {number - 1}."


def _pieces(rng: random.Random) -> str:
    factor, power = rng.randint(2, 20), rng.randint(2, 5)
    return f"{factor}x^{power} is {factor} times x^{power}. Its factor is {factor}, its power is {power}."


_KINDS = (_sum, _sum, _pair, _neighbours, _pieces)
