"""Derivatives and integrals of short polynomials with whole coefficients."""

from __future__ import annotations

import random
from collections.abc import Sequence

from trimtab.starter.mathematics.problem import WorkedProblem

Term = tuple[int, int]  # (coefficient, power)


def term_text(coefficient: int, power: int) -> str:
    """A term of a polynomial as text, without its sign.

    Example:
        >>> [term_text(3, 2), term_text(1, 1), term_text(5, 0)]
        ['3x^2', 'x', '5']
    """
    if power == 0:
        return str(coefficient)
    x = "x" if power == 1 else f"x^{power}"
    return x if coefficient == 1 else f"{coefficient}{x}"


def polynomial_text(terms: Sequence[Term]) -> str:
    """Terms joined with + (all coefficients here are positive)."""
    return " + ".join(term_text(c, p) for c, p in terms if c) or "0"


def _powers(rng: random.Random, highest: int) -> list[int]:
    return sorted(rng.sample(range(highest + 1), rng.choice((1, 2, 2, 3))), reverse=True)


def _sentence(verb: str, pairs: list[tuple[str, str]]) -> str:
    """ "The derivative of 3x^2 is 6x, of 5x is 5 and of 2 is 0." """
    parts = [f"of {a} is {b}" for a, b in pairs]
    joined = parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
    return f"The {verb} {joined}."


def derivative(rng: random.Random) -> WorkedProblem:
    """The derivative of one to three terms: the power comes down and drops by one.

    Example:
        >>> derivative(random.Random(0)).topic
        'derivative'
    """
    terms = [(rng.randint(1, 9), p) for p in _powers(rng, 4)]
    if terms == [(terms[0][0], 0)]:
        terms = [(terms[0][0], 1)]
    result = [(c * p, p - 1) for c, p in terms if p > 0]
    pairs = [(term_text(c, p), term_text(c * p, p - 1) if p else "0") for c, p in terms]
    shown = polynomial_text(terms)
    question = rng.choice(("Find the derivative of {}.", "What is the derivative of {}?")).format(shown)
    return WorkedProblem(
        "derivative", (shown,), question, _sentence("derivative", pairs), polynomial_text(result)
    )


def integral(rng: random.Random) -> WorkedProblem:
    """The integral of one to three terms; coefficients are chosen so that the result stays whole."""
    results = [(rng.randint(1, 9), p + 1) for p in _powers(rng, 3)]
    terms = [(c * p, p - 1) for c, p in results]
    pairs = [(term_text(*t), term_text(*r)) for t, r in zip(terms, results, strict=True)]
    shown = polynomial_text(terms)
    question = rng.choice(("Find the integral of {}.", "What is the integral of {}?")).format(shown)
    return WorkedProblem(
        "integral", (shown,), question, _sentence("integral", pairs), f"{polynomial_text(results)} + C"
    )
