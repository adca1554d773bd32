"""Sums, differences, products, exact quotients and sequences of small numbers."""

from __future__ import annotations

import random

from trimtab.starter.mathematics.problem import WorkedProblem

_ASK = ("What is {}?", "Compute {}.", "Work out {}.")


def _ask(rng: random.Random, expression: str) -> str:
    return rng.choice(_ASK).format(expression)


def add_steps(a: int, b: int) -> str:
    """The worked sum: tens first, then ones.

    Example:
        >>> add_steps(17, 25)
        'First add the tens: 17 + 20 = 37. Then add the ones: 37 + 5 = 42.'
    """
    tens, ones = b - b % 10, b % 10
    if tens and ones:
        half = a + tens
        return f"First add the tens: {a} + {tens} = {half}. Then add the ones: {half} + {ones} = {a + b}."
    return f"{a} + {b} = {a + b}."


def subtract_steps(a: int, b: int) -> str:
    """The worked difference: tens first, then ones."""
    tens, ones = b - b % 10, b % 10
    if tens and ones:
        half = a - tens
        return (
            f"First take away the tens: {a} - {tens} = {half}. "
            f"Then take away the ones: {half} - {ones} = {a - b}."
        )
    return f"{a} - {b} = {a - b}."


def multiply_steps(a: int, b: int) -> str:
    """The worked product: b split into ten and the rest."""
    if b > 10:
        tens, rest = a * 10, a * (b - 10)
        return (
            f"Split {b} into 10 and {b - 10}: {a} × 10 = {tens} and {a} × {b - 10} = {rest}. "
            f"Together {tens} + {rest} = {a * b}."
        )
    return f"{a} × {b} = {a * b}."


def addition(rng: random.Random) -> WorkedProblem:
    """a + b up to 120; single digits are basic facts."""
    small = rng.random() < 0.4
    a, b = (rng.randint(0, 9), rng.randint(0, 9)) if small else (rng.randint(10, 60), rng.randint(2, 60))
    question = _ask(rng, f"{a} + {b}")
    return WorkedProblem(
        "addition", (min(a, b), max(a, b)), question, add_steps(a, b), str(a + b), basic=a < 10 and b < 10
    )


def subtraction(rng: random.Random) -> WorkedProblem:
    """a - b with a result of zero or more; differences from at most 18 by one digit are basic facts."""
    if rng.random() < 0.4:
        b = rng.randint(0, 9)
        a = b + rng.randint(0, 9)
    else:
        a = rng.randint(20, 99)
        b = rng.randint(2, a)
    return WorkedProblem(
        "subtraction",
        (a, b),
        _ask(rng, f"{a} - {b}"),
        subtract_steps(a, b),
        str(a - b),
        basic=b < 10 and a - b < 10,
    )


def multiplication(rng: random.Random) -> WorkedProblem:
    """a × b with a to 9 and b to 20; the times table to 10 is basic."""
    a = rng.randint(2, 9)
    b = rng.randint(1, 10) if rng.random() < 0.6 else rng.randint(11, 20)
    return WorkedProblem(
        "multiplication", (a, b), _ask(rng, f"{a} × {b}"), multiply_steps(a, b), str(a * b), basic=b <= 10
    )


def division(rng: random.Random) -> WorkedProblem:
    """An exact quotient, from the inverted times table."""
    a, b = rng.randint(2, 9), rng.randint(1, 12)
    solution = f"{a} × {b} = {a * b}, so {a * b} / {a} = {b}."
    return WorkedProblem("division", (a * b, a), _ask(rng, f"{a * b} / {a}"), solution, str(b))


def sequence(rng: random.Random) -> WorkedProblem:
    """The next term when each is the same amount more or less than the one before."""
    step, start = rng.randint(1, 10), rng.randint(1, 30)
    terms = [start + i * step for i in range(4)]
    last, word, sign = terms[-1], "more", "+"
    if rng.random() < 0.4:
        terms.reverse()
        last, word, sign = terms[-1], "less", "-"
        if last < step:
            terms = [t + step for t in terms]
            last = terms[-1]
    answer = last + step if sign == "+" else last - step
    shown = ", ".join(map(str, terms))
    question = rng.choice(("What comes next: {}?", "Find the next number: {}.")).format(shown)
    return WorkedProblem(
        "sequence",
        tuple(terms),
        question,
        f"Each number is {step} {word} than the one before. {last} {sign} {step} = {answer}.",
        str(answer),
    )
