"""A mathematics problem, its worked solution, and how an answer is checked."""

from __future__ import annotations

import re
from dataclasses import dataclass

from trimtab.facts.randomness import derive

# One problem in ten is held out of training.
HELDOUT_ONE_IN = 10


@dataclass(frozen=True)
class Problem:
    """A question with a known answer.

    `prompt` is what a model is given; a good completion works the problem and ends in "Answer: …".
    """

    topic: str
    prompt: str
    answer: str


@dataclass(frozen=True)
class Worked:
    """A problem with its solution, as it stands in the corpus.

    `key` names the mathematics without the wording (operands of sums and products in order), so that a
    held-out problem cannot reach training in other words. `basic` facts (single-digit sums, the times
    table) are the alphabet of the rest and always belong to training.
    """

    topic: str
    key: tuple[int | str, ...]
    question: str
    solution: str
    answer: str
    basic: bool = False

    @property
    def split(self) -> str:
        """ "train" or "heldout", from the hash of topic and key."""
        if self.basic:
            return "train"
        return (
            "heldout" if derive(0, "starter-split", self.topic, *self.key) % HELDOUT_ONE_IN == 0 else "train"
        )

    @property
    def problem(self) -> Problem:
        return Problem(self.topic, f"Question: {self.question}\nSolution:", self.answer)

    @property
    def text(self) -> str:
        return f"{self.problem.prompt} {self.solution}\nAnswer: {self.answer}"


_ANSWER = re.compile(r"Answer:[ \t]*([^\n]*)")


def check(problem: Problem, completion: str) -> bool:
    """Whether the first "Answer:" line of the completion holds the right answer, spaces aside.

    Example:
        >>> check(Problem("algebra", "…", "x = 5"), " Subtract 2.\\nAnswer: x=5\\n\\nQuestion: …")
        True
        >>> check(Problem("addition", "…", "12"), "Answer: 120")
        False
    """
    found = _ANSWER.search(completion)
    if found is None:
        return False
    return _bare(found[1]) == _bare(problem.answer)


def _bare(text: str) -> str:
    return re.sub(r"\s+", "", text).rstrip(".")
