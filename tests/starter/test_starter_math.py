"""The mathematics: correct answers, a split without leaks, and the check of answers."""

from __future__ import annotations

import itertools
import random
import re

import pytest

from trimtab.facts.errors import DataError
from trimtab.starter.math import TOPICS, Problem, check, math_documents, math_problems, worked


def polynomial(text: str, x: float) -> float:
    """The value of 3x^2 + x + 5 (or of … + C with C = 0) at x."""
    total = 0.0
    for term in text.replace("+ C", "+ 0").split(" + "):
        found = re.fullmatch(r"(\d*)(x?)(?:\^(\d+))?", term.strip())
        assert found is not None, term
        coefficient = float(found[1]) if found[1] else 1.0
        power = int(found[3]) if found[3] else (1 if found[2] else 0)
        total += coefficient * x**power
    return total


def slope(text: str, x: float) -> float:
    """The derivative at x; exact for these degrees up to rounding."""
    h = 1e-3
    return (-polynomial(text, x + 2 * h) + 8 * polynomial(text, x + h) - 8 * polynomial(text, x - h) + polynomial(text, x - 2 * h)) / (12 * h)  # fmt: skip  # noqa: E501


def solve(topic: str, question: str) -> str | None:
    """The answer, worked out again from the question alone (None where that is not an equality of text)."""
    numbers = [int(n) for n in re.findall(r"\d+", question)]
    if topic in ("addition", "subtraction", "multiplication", "division"):
        a, b = numbers
        sign = re.search(r"\d ([-+×/]) \d", question)
        assert sign is not None
        if sign[1] == "/":
            assert a % b == 0
        return str({"+": a + b, "-": a - b, "×": a * b, "/": a // max(b, 1)}[sign[1]])
    if topic == "sequence":
        steps = {b - a for a, b in itertools.pairwise(numbers)}
        assert len(steps) == 1
        assert len(numbers) == 4
        return str(numbers[-1] + steps.pop())
    if topic == "algebra":
        equation = re.search(r"(\d*)x(?: ([-+]) (\d+))? = (\d+)", question)
        assert equation is not None
        a, b = int(equation[1] or 1), int(equation[3] or 0) * (-1 if equation[2] == "-" else 1)
        assert (int(equation[4]) - b) % a == 0
        return f"x = {(int(equation[4]) - b) // a}"
    return None


@pytest.mark.parametrize("topic", TOPICS)
@pytest.mark.parametrize("split", ["train", "heldout"])
def test_answers_are_right(topic: str, split: str) -> None:
    rng = random.Random(5)
    for _ in range(60):
        one = worked(topic, rng, split)
        expected = solve(topic, one.question)
        if expected is not None:
            assert one.answer == expected
        elif topic == "word problem":
            left, right = one.solution.split(" = ", 1)
            assert right.split(".")[0] == one.answer
            assert eval(left.replace("×", "*")) == int(one.answer)  # our own digits
            assert [n for n in re.findall(r"\d+", left) if n not in re.findall(r"\d+", one.question)] == []
        else:
            shown = re.search(r"(?:derivative|integral) of (.*)[.?]$", one.question)
            assert shown is not None
            low, high = (one.answer, shown[1]) if topic == "derivative" else (shown[1], one.answer)
            for x in (0.5, 1.0, 2.0):
                assert polynomial(low, x) == pytest.approx(slope(high, x), rel=1e-6)


def signature(question: str) -> str:
    """The mathematics of a question whatever its wording: numbers and signs, sums in order."""
    bare = " ".join(re.findall(r"derivative|integral|\d+|[-+×/^x=,]", question))
    found = re.fullmatch(r"(\d+) \+ (\d+)", bare)
    return f"{min(map(int, found.groups()))} + {max(map(int, found.groups()))}" if found else bare


def test_no_heldout_problem_is_ever_trained_on() -> None:
    heldout = {p.prompt for p in math_problems(3, 200)}
    sums = {signature(p.prompt.split("\n")[0]) for p in math_problems(3, 200) if p.topic != "word problem"}
    seen = 0
    for seed in (0, 1, 2):
        for text in math_documents(seed, 1500):
            for block in text.split("\n\n"):
                question = block.split("\n")[0]
                assert f"{question}\nSolution:" not in heldout
                if not re.search(r"How many", question):
                    assert signature(question) not in sums
                seen += 1
    assert seen > 10_000


def test_heldout_documents_hold_only_heldout_problems() -> None:
    train = {block.split("\n")[0] for text in math_documents(0, 2000) for block in text.split("\n\n")}
    heldout = [
        block.split("\n")[0] for text in math_documents(0, 200, "heldout") for block in text.split("\n\n")
    ]
    assert not train.intersection(heldout)


def test_documents_are_a_function_of_seed_and_index() -> None:
    whole = list(math_documents(4, 20))
    assert whole == list(math_documents(4, 8)) + list(math_documents(4, 12, start=8))
    assert whole != list(math_documents(5, 20))


def test_problems_are_different_and_cover_every_topic() -> None:
    problems = math_problems(0, 90)
    assert len({p.prompt for p in problems}) == 90
    assert {p.topic for p in problems} == set(TOPICS)
    assert problems == math_problems(0, 90)


def test_the_solution_in_the_corpus_passes_its_own_check() -> None:
    rng = random.Random(0)
    for topic in TOPICS:
        one = worked(topic, rng, "heldout")
        completion = one.text.removeprefix(one.problem.prompt)
        assert check(one.problem, completion)
        assert check(one.problem, completion + "\n\nQuestion: What is 1 + 1?\nSolution: 2.\nAnswer: 2")


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        ("Answer: 6x + 5", True),
        ("so it is.\nAnswer:6x+5", True),
        ("Answer:  6x  + 5 \nmore", True),
        ("Answer: 6x + 5.", True),
        ("Answer: 6x + 50", False),
        ("Answer: 16x + 5", False),
        ("6x + 5", False),
        ("Answer: 7\nAnswer: 6x + 5", False),
        ("Answer:\n6x + 5", False),
        ("", False),
    ],
)
def test_check(completion: str, right: bool) -> None:
    assert check(Problem("derivative", "", "6x + 5"), completion) is right


def test_unknown_split_is_an_error() -> None:
    with pytest.raises(DataError, match="no split"):
        next(math_documents(0, 1, "test"))


def test_too_many_problems_is_an_error() -> None:
    assert len({p.prompt for p in math_problems(0, 1000)}) == 1000
    with pytest.raises(DataError, match="at most 1000"):
        math_problems(0, 1001)
