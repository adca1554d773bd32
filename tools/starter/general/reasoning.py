"""Small paragraphs that follow from what they say: orders, kinds, places, quantities, and talk about them."""

# ruff: noqa: E501 (a template reads better on one line)

from __future__ import annotations

import random
from collections.abc import Callable

from tools.starter.general import words, world
from tools.starter.general.grammar import Grammar, polish
from trimtab.starter.mathematics.words import BOYS, COUNTED, GIRLS, plural

_G = Grammar({})
NAMES = GIRLS + BOYS
COMPARATIVES = (
    ("taller", "shorter", "tallest"), ("older", "younger", "oldest"), ("faster", "slower", "fastest"),
    ("stronger", "weaker", "strongest"), ("richer", "poorer", "richest"), ("bigger", "smaller", "biggest"),
    ("louder", "quieter", "loudest"), ("happier", "sadder", "happiest"),
)  # fmt: skip


def order(rng: random.Random) -> str:
    """A is taller than B, B is taller than C, so A is taller than C."""
    a, b, c = rng.sample(NAMES, 3)
    more, less, most = rng.choice(COMPARATIVES)
    s = {"a": a, "b": b, "c": c, "more": more, "less": less, "most": most}
    first = rng.choice(("{a} is {more} than {b}. {b} is {more} than {c}.", "{b} is {more} than {c}. {a} is {more} than {b}.",
                        "{c} is {less} than {b}. {b} is {less} than {a}.", "{a} is {more} than {b}, and {b} is {more} than {c}."))  # fmt: skip
    lines = ["So {a} is {more} than {c}.", "So {c} is {less} than {a}.", "{a} is the {most} of the three.",
             "Of the three, {a} is the {most}.", "{c} is not {more} than {a}."]  # fmt: skip
    return polish(_G.expand(" ".join([first, *rng.sample(lines, rng.randint(1, 3))]), s, rng))


def kinds(rng: random.Random) -> str:
    """All birds have feathers, a robin is a bird, so a robin has feathers."""
    row = rng.choice([r for r in world.ANIMALS if r[1] in world.CLASSES])
    kind, s = row[1], {"n": row[0], "ns": plural(row[0]), "kind": row[1], "kinds": plural(row[1])}
    s["fact"] = rng.choice(world.CLASSES[kind])
    return polish(_G.expand(
        "[All {kinds} {fact}. [A {n} is a {kind}.|{ns} are {kinds}.] So {ns} {fact}.|"
        "Do {ns} {fact}? Yes, because {ns} are {kinds}, and all {kinds} {fact}.]", s, rng))  # fmt: skip


def whereabouts(rng: random.Random) -> str:
    """Who went where, who has what, and where they are now."""
    a, b = rng.sample(NAMES, 2)
    p, q = rng.sample(words.PLACES, 2)
    t, u = rng.sample(words.TOYS, 2)
    s = {"a": a, "b": b, "p": p, "q": q, "t": t, "u": u}
    return polish(_G.expand(
        "[{a} went to {p}. {b} went to {q}. Now {a} is at {p}, and {b} is at {q}.|"
        "{a} has a {t}. {b} has a {u}. {a} gave the {t} to {b}. Now {b} has the {t} and the {u}.|"
        "{a} put the {t} into the box. Then {a} put the box on the shelf. Where is the {t}? It is in the box on the shelf.|"
        "{a} was at {p}. Then {a} walked to {q}. Where is {a} now? {a} is at {q}.|"
        "{a} took the {t}, and {b} took the {u}. Who has the {u}? {b} has it.|"
        "{a} and {b} went to {p}. {b} came home first, so {a} was still at {p}.]", s, rng))  # fmt: skip


def days(rng: random.Random) -> str:
    """The order of days and months."""
    i, j = rng.randrange(7), rng.randrange(12)
    s = {"d": words.DAYS[i], "n": words.DAYS[(i + 1) % 7], "y": words.DAYS[i - 1], "m": words.MONTHS[j],
         "o": words.MONTHS[(j + 1) % 12], "l": words.MONTHS[j - 1]}  # fmt: skip
    return polish(_G.expand(
        "[Today is {d}. Tomorrow is {n}, and yesterday was {y}.|The day after {d} is {n}.|After {m} comes {o}.|"
        "{m} comes before {o} and after {l}.|If today is {d}, then tomorrow is {n}.|There are seven days in a week and twelve months in a year. "
        "After {d} comes {n}.]", s, rng))  # fmt: skip


def counting(rng: random.Random) -> str:
    """Counting and quantities in sentences: numbers as words and figures, no sums written out."""
    noun = rng.choice(COUNTED)
    n = rng.randint(2, 12)
    low = rng.randint(1, 90)
    s = {"a": rng.choice(NAMES), "n": words.NUMBERS[n], "f": str(rng.randint(2, 60)), "ns": plural(noun), "m": words.NUMBERS[n + 1],
         "k": words.NUMBERS[n - 1], "run": ", ".join(words.NUMBERS[n - 1 : n + 4]), "fig": ", ".join(str(low + i) for i in range(5)),
         "p": rng.choice(words.PLACES), "col": rng.choice(words.COLOURS), "yr": str(rng.randint(3, 90)), "no": str(rng.randint(1, 99)),
         "ns2": plural(rng.choice(COUNTED))}  # fmt: skip
    return polish(_G.expand(
        "[{a} has {n} {ns}. [Some are big and some are small.|They are in a box.|{a} likes all of them.]|"
        "{a} counted the {ns}: {run}.|There are {f} {ns} and many {ns2} at {p}.|{a} lives at number {no}. The house is {yr} years old.|"
        "\"How many {ns} do you see?\" asked {a}. \"I see {n} {ns}.\"|Count with me: {fig}.|After {n} comes {m}, and before {n} comes {k}.|"
        "{a} bought {n} {col} {ns} and gave one of them away.|It took {f} minutes to walk to {p}.|{a} is {yr} years old.|"
        "{a} read {f} pages on Monday and more on Tuesday.|Nobody has {f} {ns}, but {a} has {n}.]", s, rng))  # fmt: skip


def talk(rng: random.Random) -> str:
    """A short conversation: greeting, question, answer, parting."""
    a, b = rng.sample(NAMES, 2)
    p, q = rng.sample(words.PLACES, 2)
    f, g = rng.sample(words.FOODS, 2)
    s = {
        "a": a,
        "b": b,
        "p": p,
        "q": q,
        "f": f,
        "g": g,
        "t": rng.choice(words.TOYS),
        "n": words.NUMBERS[rng.randint(2, 12)],
    }
    topics = [
        '"What are you doing[ today|]?" {a} asked. "I am [going to {p}|making {f}|looking for my {t}|waiting for the bus|reading a book]," {b} said.',
        '"Do you like {f}?" asked {a}. "[Yes, very much|No, I like {g} better|Only a little|I have never tried it]," said {b}.',
        '"Where is the {t}?" {a} asked. "It is [on the table|under the chair|in my bag|at {p}]," {b} answered.',
        '"Would you like to come to {p} with me?" {a} asked. "[I would love to|Not today, I am tired|Yes, but I have to ask my mother first]," {b} said.',
        '"[Why are you laughing?" asked {a}. "Because I heard a funny story|Why are you crying?" asked {a}. "Because I lost my {t}|Why are you so late?" asked {a}. "Because I missed the train|Why are you so tired?" asked {a}. "Because I did not sleep well|Why are you so happy?" asked {a}. "Because it is my birthday]," said {b}.',
        '"How far is it to {q}?" {a} asked. "It is about {n} miles," {b} said. "[That is too far to walk|We should take the bus|Let us go]," said {a}.',
        '"Can you help me with this {t}?" {a} asked. "[Of course,|Give it to me,|What is wrong with it?]" {b} said.',
    ]
    start = rng.choice(('{a} met {b} at {p}.', '"[Good morning|Hello|Good evening], {b}," said {a}. "[Good morning|Hello|Good evening], {a}," said {b}.',
                        '{a} and {b} were sitting at {p}.', '{b} was at home when {a} came to visit.'))  # fmt: skip
    end = rng.choice(('"Goodbye, {a}," {b} said. "See you tomorrow."', 'Then they went home.', '"Thank you," {a} said.', "", 'They talked until it was dark.'))  # fmt: skip
    lines = [start, *rng.sample(topics, rng.randint(2, 4)), end]
    return polish(_G.expand(rng.choice((" ", "\n")).join(lines).strip(), s, rng))


WRITERS: tuple[Callable[[random.Random], str], ...] = (
    order, order, kinds, whereabouts, whereabouts, days, counting, counting, talk, talk, talk, talk,
)  # fmt: skip


def short_texts(rng: random.Random) -> str:
    """One document of a few such paragraphs of one kind."""
    write = rng.choice(WRITERS)
    if write is talk:
        return talk(rng)
    return rng.choice((" ", "\n", "\n\n")).join(write(rng) for _ in range(rng.randint(2, 6)))
