"""Linear equations in one unknown."""

from __future__ import annotations

import random

from trimtab.starter.mathematics.problem import WorkedProblem


def algebra(rng: random.Random) -> WorkedProblem:
    """Solve a x + b = c, x + b = c or a x - b = c for a whole x.

    Example:
        >>> algebra(random.Random(1)).answer.startswith("x = ")
        True
    """
    a, x, b = rng.randint(2, 9), rng.randint(1, 10), rng.randint(1, 20)
    kind = rng.random()
    if kind < 0.25:
        question, steps = f"x + {b} = {x + b}", f"Subtract {b} from both sides: x = {x + b} - {b} = {x}."
        key: tuple[int | str, ...] = ("x+", b, x + b)
    elif kind < 0.4:
        question, steps = f"{a}x = {a * x}", f"Divide both sides by {a}: x = {a * x} / {a} = {x}."
        key = ("ax", a, a * x)
    elif kind < 0.8 or a * x <= b:
        total = a * x + b
        question = f"{a}x + {b} = {total}"
        steps = f"Subtract {b} from both sides: {a}x = {a * x}. Divide by {a}: x = {x}."
        key = ("ax+", a, b, total)
    else:
        total = a * x - b
        question = f"{a}x - {b} = {total}"
        steps = f"Add {b} to both sides: {a}x = {a * x}. Divide by {a}: x = {x}."
        key = ("ax-", a, b, total)
    asked = rng.choice(("Solve {} for x.", "Find x if {}.")).format(question)
    return WorkedProblem("algebra", key, asked, steps, f"x = {x}")
