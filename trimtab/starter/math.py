"""The mathematics corpus, generated at run time (`starter:math`, exact answers): documents and held-out problems.

A document has one to six problems, each with a short worked solution and an "Answer:" line:

    Question: Solve 3x + 5 = 20 for x.
    Solution: Subtract 5 from both sides: 3x = 15. Divide by 3: x = 5.
    Answer: x = 5

A hash of the problem itself (`mathematics.problem`) determines whether it is held out, not the seed: no seed can put a
held-out problem into a training document.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from trimtab.facts.errors import DataError
from trimtab.facts.randomness import derive
from trimtab.starter.mathematics.algebra import algebra
from trimtab.starter.mathematics.arithmetic import addition, division, multiplication, sequence, subtraction
from trimtab.starter.mathematics.calculus import derivative, integral
from trimtab.starter.mathematics.problem import Problem, WorkedProblem, check
from trimtab.starter.mathematics.word_problems import word_problem

__all__ = [
    "FIELDS",
    "SPLITS",
    "TOPICS",
    "Problem",
    "WorkedProblem",
    "check",
    "math_chats",
    "math_documents",
    "math_problems",
    "worked",
]

TOPICS: dict[str, Callable[[random.Random], WorkedProblem]] = {
    "addition": addition,
    "subtraction": subtraction,
    "multiplication": multiplication,
    "division": division,
    "algebra": algebra,
    "derivative": derivative,
    "integral": integral,
    "sequence": sequence,
    "word problem": word_problem,
}
SPLITS = ("train", "heldout")
FIELDS: dict[str, tuple[str, ...]] = {
    "math": tuple(TOPICS),
    "arithmetic": ("addition", "subtraction", "multiplication", "division", "sequence", "word problem"),
    "algebra": ("algebra",),
    "calculus": ("derivative", "integral"),
}
"""Topics of each part of the corpus, by its name in recipes (`starter:calculus`)."""
MAX_PROBLEMS = 1000
"""Far fewer than the held-out problems of the larger topics."""


def worked(topic: str, rng: random.Random, split: str) -> WorkedProblem:
    """Draw problems of a topic until one belongs to the split."""
    if split not in SPLITS:
        raise DataError(f"there is no split {split!r} of the mathematics", f"use one of {', '.join(SPLITS)}")
    make = TOPICS[topic]
    while True:
        problem = make(rng)
        if problem.split == split:
            return problem


def math_documents(
    seed: int, count: int, split: str = "train", start: int = 0, *, topics: Sequence[str] = tuple(TOPICS)
) -> Iterator[str]:
    """Yield `count` documents from index `start`; each depends only on (seed, split, index, topics).

    Example:
        >>> next(math_documents(0, 1)).startswith("Question: ")
        True
    """
    names = list(topics)
    for index in range(start, start + count):
        rng = random.Random(derive(seed, "mathematics", split, index))
        topic = rng.choice(names)
        mixed = rng.random() < 0.4
        problems = [
            worked(rng.choice(names) if mixed else topic, rng, split) for _ in range(rng.randint(1, 6))
        ]
        yield "\n\n".join(p.text for p in problems)


def math_chats(
    seed: int, count: int, split: str = "train", *, topics: Sequence[str] = tuple(TOPICS)
) -> Iterator[list[dict[str, str]]]:
    """Yield `count` conversations of one to three problems, each a question and its worked answer.

    Example:
        >>> [message["role"] for message in next(math_chats(3, 1))][:2]
        ['user', 'assistant']
    """
    names = list(topics)
    for index in range(count):
        rng = random.Random(derive(seed, "mathematics-chat", split, index))
        messages: list[dict[str, str]] = []
        for _ in range(rng.choice((1, 1, 2, 3))):
            problem = worked(rng.choice(names), rng, split)
            answer = f"{problem.solution}\nAnswer: {problem.answer}"
            messages += [
                {"role": "user", "content": problem.question},
                {"role": "assistant", "content": answer},
            ]
        yield messages


def math_problems(seed: int, count: int, topics: Sequence[str] = tuple(TOPICS)) -> list[Problem]:
    """Distinct held-out problems, alternating between topics.

    Example:
        >>> [p.topic for p in math_problems(0, 2)]
        ['addition', 'subtraction']
    """
    if count > MAX_PROBLEMS:
        raise DataError(f"{count} held-out problems were requested", f"request at most {MAX_PROBLEMS}")
    names = list(topics)
    rng = random.Random(derive(seed, "mathematics-problems"))
    problems: dict[tuple[object, ...], Problem] = {}
    turn = tries = 0
    while len(problems) < count:
        drawn = worked(names[turn % len(names)], rng, "heldout")
        is_new = (drawn.topic, drawn.key) not in problems
        tries += 1
        if is_new:
            problems[drawn.topic, drawn.key] = drawn.problem
        if is_new or tries == 50:  # a topic without unused held-out problems is skipped
            turn, tries = turn + 1, 0
    return list(problems.values())
