"""Everyday questions with their answers: who has more, where it is, what colour; without sums and variables.

    Question: Mia has five pears and Tom has three. Who has more pears?
    Solution: Five is more than three, so Mia has more pears.
    Answer: Mia

The model thereby learns the words "Question", "Solution" and "Answer" before it is trained on mathematics.
"""

# ruff: noqa: E501 (a template reads better on one line)

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from tools.starter.general import words, world
from tools.starter.general.grammar import Grammar, polish
from trimtab.starter.mathematics.words import BOYS, COUNTED, GIRLS, plural

_G = Grammar({})
NAMES = GIRLS + BOYS


class Asked(NamedTuple):
    """A question, the sentence that solves it and the words that answer it."""

    question: str
    solution: str
    answer: str


def _asked(rng: random.Random, question: str, solution: str, answer: str, scene: dict[str, str]) -> Asked:
    return Asked(*(polish(_G.expand(part, scene, rng)) for part in (question, solution, answer)))


def _more(rng: random.Random) -> Asked:
    a, b = rng.sample(NAMES, 2)
    low, high = sorted(rng.sample(range(2, 13), 2))
    s = {
        "a": a,
        "b": b,
        "h": words.NUMBERS[high],
        "l": words.NUMBERS[low],
        "ns": plural(rng.choice(COUNTED)),
    }
    told = rng.choice(("{a} has {h} {ns} and {b} has {l}.", "{b} has {l} {ns}, but {a} has {h}.", "There are {h} {ns} in {a}'s box and {l} in {b}'s box."))  # fmt: skip
    if rng.random() < 0.5:
        return _asked(rng, told + " Who has more {ns}?", "[{h} is more than {l}, so {a} has more {ns}.|{a} has more {ns}, because {h} is more than {l}.]", "{a}", s)  # fmt: skip
    return _asked(rng, told + " Who has fewer {ns}?", "[{l} is less than {h}, so {b} has fewer {ns}.|{b} has fewer {ns}, because {l} is less than {h}.]", "{b}", s)  # fmt: skip


def _where(rng: random.Random) -> Asked:
    a, b = rng.sample(NAMES, 2)
    p, q = rng.sample(words.PLACES, 2)
    several = rng.random() < 0.5
    t = rng.choice(words.TOYS)
    s = {"a": a, "b": b, "p": p, "q": q, "t": plural(t) if several else t, "h": rng.choice(words.HIDING_PLACES),
         "are": "are" if several else "is", "they": "they" if several else "it", "them": "them" if several else "it"}  # fmt: skip
    return rng.choice((
        lambda: _asked(rng, "{a} put the {t} {h}. [Nobody moved {them}.|Then {a} went to {p}.] Where {are} the {t}?", "[{a} put the {t} {h}, so {they} {are} still there.|The {t} {are} {h}, because {a} put {them} there.]", "{h}", s),
        lambda: _asked(rng, "{a} and {b} left the house. [{a} went to {p}, and {b} went to {q}.|{b} went to {q}, and {a} went to {p}.] Who is at {q}?", "[{b} went to {q}, so {b} is there.|{b} is at {q}, and {a} is at {p}.]", "{b}", s),
        lambda: _asked(rng, "{a} has the {t}. {a} gives the {t} to {b}. Who has the {t} now?", "[{b} has the {t} now, because {a} gave {them} away.|{a} gave {them} to {b}, so now {b} has {them}.]", "{b}", s),
    ))()  # fmt: skip


def _colour(rng: random.Random) -> Asked:
    a, b = rng.sample(NAMES, 2)
    several = rng.random() < 0.5
    t, c, d = rng.choice(words.TOYS), *rng.sample(words.COLOURS, 2)
    s = {"a": a, "b": b, "c": c, "d": d, "t": plural(t) if several else t, "are": "are" if several else "is",
         "a_c": f"two {c} {plural(t)}" if several else f"a {c} {t}", "a_d": f"two {d} {plural(t)}" if several else f"a {d} {t}"}  # fmt: skip
    return _asked(rng, "[{a} has {a_c}, and {b} has {a_d}.|{b} has {a_d}, and {a} has {a_c}.] What color {are} the {t} of {b}?", "[{b} has {a_d}, so the color is {d}.|The {t} of {b} {are} {d}.]", "{d}", s)  # fmt: skip


def _fact(rng: random.Random) -> Asked:
    kind = rng.randrange(6)
    if kind == 0:
        name, capital, continent, language, _ = rng.choice(world.COUNTRIES)
        s = {"n": name, "cap": capital, "cont": continent, "lang": language}
        return rng.choice((
            lambda: _asked(rng, "What is the capital of {n}?", "[The capital of {n} is {cap}.|{n} is a country in {cont}, and its capital is {cap}.]", "{cap}", s),
            lambda: _asked(rng, "Which language do people speak in {n}?", "The people of {n} speak {lang}.", "{lang}", s),
        ))()  # fmt: skip
    if kind == 1:
        name, group, home, food, body, _, young, *_ = rng.choice(world.ANIMALS)
        s = {
            "n": name,
            "ns": plural(name),
            "kind": group,
            "home": home,
            "food": food,
            "body": body,
            "young": young,
        }
        return rng.choice((
            lambda: _asked(rng, "[Where do {ns} live?|Where does a {n} live?]", "[{ns} live in {home}.|A {n} lives in {home}.]", "in {home}", s),
            lambda: _asked(rng, "[What do {ns} eat?|What does a {n} eat?]", "[{ns} eat {food}.|A {n} eats {food}.]", "{food}", s),
            lambda: _asked(rng, "What are the young of a {n} called?", "The young of a {n} are called {young}.", "{young}", s),
            lambda: _asked(rng, "What kind of animal is a {n}?", "A {n} is a {kind}. It has {body}.", "a {kind}", s),
        ))()  # fmt: skip
    if kind == 2:
        tool, _, use, made = rng.choice([row for row in world.TOOLS if not row[0].endswith("s")])
        return _asked(rng, "[What do we use a {n} for?|What is a {n} for?]", "[We use a {n} to {u}.|With a {n} you can {u}. It is made of {m}.]", "to {u}", {"n": tool, "u": use, "m": made})  # fmt: skip
    if kind == 3:
        a, b = rng.choice(world.OPPOSITES)
        return _asked(rng, "What is the opposite of {a}?", "[What is not {a} is {b}.|The opposite of {a} is {b}.]", "{b}", {"a": a, "b": b})  # fmt: skip
    if kind == 4:
        cause, effect = rng.choice(world.CAUSES)
        return _asked(rng, "What happens when {c}?", "[When {c}, {e}.|If {c}, then {e}.]", "{e}", {"c": cause, "e": effect})  # fmt: skip
    part, use = rng.choice(world.BODY)
    return _asked(rng, "What do we {u} with?", "We {u} with our {n}.", "our {n}", {"u": use, "n": part})


def _next(rng: random.Random) -> Asked:
    names = rng.choice((words.DAYS, words.MONTHS))
    i = rng.randrange(len(names))
    s = {"d": names[i], "n": names[(i + 1) % len(names)], "y": names[i - 1], "what": "day" if names is words.DAYS else "month"}  # fmt: skip
    return rng.choice((
        lambda: _asked(rng, "Which {what} comes after {d}?", "[{d} is followed by {n}.|The {what} after {d} is {n}.]", "{n}", s),
        lambda: _asked(rng, "Which {what} comes before {d}?", "[Before {d} comes {y}.|The {what} before {d} is {y}.]", "{y}", s),
    ))()  # fmt: skip


WRITERS: tuple[Callable[[random.Random], Asked], ...] = (
    _more,
    _more,
    _where,
    _where,
    _colour,
    _fact,
    _fact,
    _next,
)


def asking(rng: random.Random) -> str:
    """One document: one to five questions, all in the same of three forms.

    Example:
        >>> asking(random.Random(1)).startswith("Question: ")
        True
    """
    form = rng.choice((
        "Question: {q}\nSolution: {s}\nAnswer: {a}", "Question: {q}\nSolution: {s}\nAnswer: {a}", "Question: {q}\nSolution: {s}", "Question: {q}\nAnswer: {s}",
    ))  # fmt: skip
    found = [rng.choice(WRITERS)(rng) for _ in range(rng.randint(1, 5))]
    return "\n\n".join(form.format(q=one.question, s=one.solution, a=one.answer) for one in found)
