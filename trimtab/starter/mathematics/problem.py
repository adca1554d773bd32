"""Mathematics problems with worked solutions, and the check of an answer."""

from __future__ import annotations

import re
from dataclasses import dataclass

from trimtab.facts.randomness import derive

# One problem in ten is held out of training.
HELDOUT_ONE_IN = 10


@dataclass(frozen=True)
class Problem:
    """A question with a known answer.

    `prompt` is the input of a model; a good completion solves the problem and ends in "Answer: …".
    """

    topic: str
    prompt: str
    answer: str


@dataclass(frozen=True)
class WorkedProblem:
    """A problem with its worked solution, as in the corpus.

    `key` identifies the problem independently of its wording (operands of sums are sorted), so that a held-out problem
    cannot occur in training in other words. `basic` facts (single-digit sums, the times table) are the basis of all
    other problems and always belong to training.
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
