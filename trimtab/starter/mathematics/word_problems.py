"""Word problems: a short story with two numbers and a question."""

from __future__ import annotations

import random
from typing import NamedTuple

from trimtab.starter.mathematics.problem import WorkedProblem
from trimtab.starter.mathematics.words import BOYS, COUNTED, GIRLS, plural


class Template(NamedTuple):
    """A story with {n}ame, {a}, {b}, {things}, and the operation on the two numbers."""

    text: str
    operation: str
    ending: str


TEMPLATES = (
    Template(
        "{n} has {a} {things} and gets {b} more. How many {things} does {n} have now?",
        "+",
        "{n} has {r} {things}.",
    ),
    Template(
        "There are {a} {things} on the table and {b} in the box. How many {things} are there?",
        "+",
        "There are {r} {things}.",
    ),
    Template(
        "{n} finds {a} {things} on Monday and {b} on Tuesday. How many {things} does {n} find?",
        "+",
        "{n} finds {r} {things}.",
    ),
    Template(
        "{n} has {a} {things} and gives {b} away. How many {things} are left?", "-", "{r} {things} are left."
    ),
    Template(
        "There were {a} {things}. Now {b} are gone. How many {things} are left?",
        "-",
        "{r} {things} are left.",
    ),
    Template(
        "{n} needs {a} {things} and has {b}. How many more {things} does {n} need?",
        "-",
        "{n} needs {r} more.",
    ),
    Template(
        "{n} has {a} boxes with {b} {things} each. How many {things} are there?",
        "×",
        "There are {r} {things}.",
    ),
    Template(
        "{n} buys {b} {things} a day for {a} days. How many {things} does {n} buy?",
        "×",
        "{n} buys {r} {things}.",
    ),
    Template(
        "{n} shares {p} {things} equally among {a} friends. How many {things} does each friend get?",
        "/",
        "Each friend gets {r} {things}.",
    ),
)
_NOUNS = tuple(n for n in COUNTED if n not in ("kitten", "tree", "star", "chair", "box"))


def word_problem(rng: random.Random) -> WorkedProblem:
    """A story about one person and small numbers.

    Example:
        >>> word_problem(random.Random(5)).topic
        'word problem'
    """
    index = rng.randrange(len(TEMPLATES))
    template = TEMPLATES[index]
    if template.operation == "+":
        a, b = rng.randint(2, 30), rng.randint(2, 12)
        result, sum_text = a + b, f"{a} + {b} = {a + b}"
    elif template.operation == "-":
        b, rest = rng.randint(2, 12), rng.randint(2, 20)
        a = b + rest
        result, sum_text = rest, f"{a} - {b} = {rest}"
    elif template.operation == "×":
        a, b = rng.randint(2, 9), rng.randint(2, 10)
        result, sum_text = a * b, f"{a} × {b} = {a * b}"
    else:
        a, b = rng.randint(2, 9), rng.randint(2, 10)
        result, sum_text = b, f"{a * b} / {a} = {b}"
    slots = {
        "n": rng.choice(GIRLS + BOYS),
        "things": plural(rng.choice(_NOUNS)),
        "a": a,
        "b": b,
        "p": a * b,
        "r": result,
    }
    solution = f"{sum_text}. {template.ending.format(**slots)}"
    return WorkedProblem("word problem", (index, a, b), template.text.format(**slots), solution, str(result))
