"""Exact-match evaluation: the number of problems that a model solves by generation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar


class Question(Protocol):
    """A problem with a known answer."""

    @property
    def topic(self) -> str: ...
    @property
    def prompt(self) -> str: ...
    @property
    def answer(self) -> str: ...


Q = TypeVar("Q", bound=Question)


@dataclass(frozen=True)
class Example:
    """One problem with the model's completion."""

    topic: str
    prompt: str
    answer: str
    completion: str
    right: bool


@dataclass(frozen=True)
class AnswerResult:
    """Number of exactly right answers, in total and by topic ([right, total]), with example completions."""

    exact: int
    total: int
    by_topic: dict[str, list[int]]
    examples: list[Example]
    right: list[bool]
    """Whether each problem was solved, in the given order, to compare two models problem by problem."""


def exact_answers(
    complete: Callable[[list[str]], list[str]],
    problems: Sequence[Q],
    check: Callable[[Q, str], bool],
    *,
    num_examples: int = 12,
) -> AnswerResult:
    """Complete every prompt with a model and count the exactly right answers.

    Args:
        complete: maps prompts to completions (without the prompts), in order; greedy for reproducible results.
        problems: each with a topic, a prompt and an answer.
        check: whether a completion answers the problem (`trimtab.starter.check`).
        num_examples: number of problems returned with their completions, alternating between topics.

    Example:
        >>> from trimtab.starter import check, math_problems
        >>> problems = math_problems(0, 2)
        >>> exact_answers(lambda prompts: ["Answer: no idea"] * len(prompts), problems, check).exact
        0
    """
    completions = complete([problem.prompt for problem in problems])
    assert len(completions) == len(problems), "one completion per prompt is required"
    examples: dict[str, list[Example]] = {}
    by_topic: dict[str, list[int]] = {}
    results = [check(problem, completion) for problem, completion in zip(problems, completions, strict=True)]
    for problem, completion, right in zip(problems, completions, results, strict=True):
        counts = by_topic.setdefault(problem.topic, [0, 0])
        counts[0] += right
        counts[1] += 1
        of_topic = examples.setdefault(problem.topic, [])
        of_topic.append(Example(problem.topic, problem.prompt, problem.answer, completion, right))
    return AnswerResult(sum(results), len(problems), by_topic, _round_robin(examples, num_examples), results)


def _round_robin(examples: dict[str, list[Example]], count: int) -> list[Example]:
    """The first example of each topic, then the second of each, …"""
    longest = max(map(len, examples.values()), default=0)
    return [of_topic[i] for i in range(longest) for of_topic in examples.values() if i < len(of_topic)][
        :count
    ]
