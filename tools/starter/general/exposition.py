"""Plain expository paragraphs over the tables of `world`: animals, countries, tools, seasons, causes."""

# ruff: noqa: E501 (a template reads better on one line)

from __future__ import annotations

import random
from collections.abc import Callable

from tools.starter.general import words, world
from tools.starter.general.grammar import Grammar, polish
from trimtab.starter.mathematics.words import BOYS, GIRLS, plural

_G = Grammar({})


def _pick(rng: random.Random, sentences: list[str], low: int, high: int) -> list[str]:
    """Some of the sentences, in their order."""
    keep = sorted(rng.sample(range(len(sentences)), min(len(sentences), rng.randint(low, high))))
    return [sentences[i] for i in keep]


def _write(rng: random.Random, sentences: list[str], scene: dict[str, str]) -> str:
    return polish(" ".join(_G.expand(s, scene, rng) for s in sentences))


def animal(rng: random.Random) -> str:
    """What an animal is, where it lives, what it eats, how it moves."""
    name, kind, home, food, body, moves, young, sound, size = rng.choice(world.ANIMALS)
    s = {"n": name, "ns": plural(name), "kind": kind, "home": home, "food": food, "body": body, "moves": moves,
         "young": young, "sound": sound, "size": size}  # fmt: skip
    common, also = world.CLASSES.get(kind, ("are found almost everywhere", "are useful"))
    s["common"], s["also"] = common, also
    lines = [
        "[The {n} lives in {home}.|{ns} live in {home}.|You can find {ns} in {home}.]",
        "[It has {body}.|A {n} has {body}.|The {n} is known for {body}.|{ns} have {body}.]",
        "[It eats {food}.|{ns} eat {food}.|The {n} feeds on {food}.|Most of the time, it eats {food}.]",
        "[A {n} {moves}.|The {n} {moves}.]",
        "[The {n} {sound}.|A {n} {sound}.]",
        "[Its young are called {young}.|The young of a {n} are called {young}.|{ns} take good care of their {young}.|In spring, you may see the {young}.]",
        "[Compared with other animals, it is {size}.|It is a {size} animal.]",
    ]
    rng.shuffle(lines)
    first = "[A {n} is a {kind}.|The {n} is a {kind}.|{ns} are interesting animals. A {n} is a {kind}.]"
    if kind in world.CLASSES:
        first += " [All {kinds} {common}.|Like all {kinds}, {ns} {common}.|{kinds} {also}.|]"
        s["kinds"] = plural(kind)
    return _write(rng, [first, *_pick(rng, lines, 3, 6)], s)


def country(rng: random.Random) -> str:
    """A country, its capital, continent and language."""
    name, capital, continent, language, known = rng.choice(world.COUNTRIES)
    s = {"n": name, "cap": capital, "cont": continent, "lang": language, "known": known}
    lines = [
        "[The capital of {n} is {cap}.|{cap} is the capital of {n}.|Its capital is {cap}.]",
        "[{n} is in {cont}.|{n} lies in {cont}.|You find {n} on the map of {cont}.]",
        "[People there speak {lang}.|The people of {n} speak {lang}.|In {n}, most people speak {lang}.]",
        "[{n} is known for {known}.|Many people know {n} for {known}.|Travelers like {known}.]",
        "[Many people live in {cap}.|{cap} is a large city.|In {cap} there are many streets, shops and museums.]",
        "[Every year, many people visit {n}.|It is a beautiful country.|Some people travel there by train, and others by plane.]",
    ]
    return _write(rng, ["{n} is a country in {cont}.", *_pick(rng, lines, 3, 5)], s)


def tool(rng: random.Random) -> str:
    """What a tool is for, who uses it and what it is made of."""
    name, user, use, made = rng.choice(world.TOOLS)
    s = {"n": name, "u": user, "use": use, "made": made, "adult": rng.choice(GIRLS + BOYS)}
    a = "{n}" if name.endswith("s") else "a {n}"
    are, it = ("are", "they") if name.endswith("s") else ("is", "it")
    lines = [
        f"[{a} {are} used to {{use}}.|We use {a} to {{use}}.|With {a} you can {{use}}.|People need {a} to {{use}}.]",
        f"[A {{u}} often works with {a}.|Every {{u}} has {a}.|A good {{u}} takes care of {it.replace('they', 'them')}.]",
        f"[Most are made of {{made}}.|{it} {are} made of {{made}}.]",
        f"[Long ago, people made {it.replace('they', 'them')} by hand.|{it} {are} very useful.|You find {a} in almost every house.]",
        "[{adult} has one at home.|Be careful when you use it.|It must be kept dry and clean.]",
    ]
    return _write(rng, [lines[0], *_pick(rng, lines[1:], 2, 4)], s)


def season(rng: random.Random) -> str:
    """One season, what the weather does and what people do."""
    i = rng.randrange(4)
    name, *facts = world.SEASONS[i]
    s = {"n": name, "next": world.SEASONS[(i + 1) % 4][0], "last": world.SEASONS[i - 1][0]}
    rng.shuffle(facts)
    lines = [
        "[There are four seasons in a year: spring, summer, autumn and winter.|A year has four seasons.|]"
    ]
    lines += [f"[In {{n}},|When it is {{n}},|During {{n}},] {f}." for f in facts[: rng.randint(2, 4)]]
    lines += ["[After {n} comes {next}.|{n} comes after {last}.|{n} is followed by {next}.]"]
    return _write(rng, lines, s)


def causes(rng: random.Random) -> str:
    """Causes and effects, each said in one of several ways."""
    parts = []
    for cause, effect in rng.sample(world.CAUSES, rng.randint(3, 6)):
        s = {"c": cause, "e": effect}
        parts.append(_G.expand(
            "[When {c}, {e}.|If {c}, {e}.|{e} when {c}.|{c}. That is why {e}.|{c}, and so {e}.|"
            "Whenever {c}, {e}.|We know that if {c}, {e}.]", s, rng))  # fmt: skip
    return polish(" ".join(parts))


def opposites(rng: random.Random) -> str:
    """Opposite words in sentences."""
    parts = []
    for a, b in rng.sample(world.OPPOSITES, rng.randint(3, 6)):
        if rng.random() < 0.5:
            a, b = b, a
        parts.append(_G.expand(
            "[The opposite of {a} is {b}.|{a} is the opposite of {b}.|If something is not {a}, it may be {b}.|"
            "One is {a}, and the other is {b}.|What is {a} is not {b}.]", {"a": a, "b": b}, rng))  # fmt: skip
    return polish(" ".join(parts))


def body(rng: random.Random) -> str:
    """Parts of the body and what they do."""
    parts = [_G.expand("[We {v} with our {n}.|Our {n} help us to {v}.|People use their {n} to {v}.|The {n} are there to {v}.]"
                       if n.endswith(("s", "feet", "teeth")) else
                       "[We {v} with our {n}.|The {n} helps us to {v}.|The {n} is there to {v}.|People use the {n} to {v}.]",
                       {"n": n, "v": v}, rng)
             for n, v in rng.sample(world.BODY, rng.randint(3, 6))]  # fmt: skip
    return polish(" ".join(parts))


def origin(rng: random.Random) -> str:
    """Where a thing comes from, step by step."""
    product, material, place, maker = rng.choice(world.FOOD_ORIGINS)
    s = {"p": product, "m": material, "pl": place, "mk": maker}
    lines = [
        "[Where does {p} come from?|Have you ever asked where {p} comes from?|Let us see how {p} is made.|]",
        "{p} is made from {m}.", "[{m} comes from {pl}.|The {m} comes from {pl}.]" if material.count(" ") == 0 else "It comes from {pl}.",
        "[Then {mk} makes {p} out of it.|{mk} turns it into {p}.|At last, {mk} makes {p}.]",
        "[It takes time and work.|After that, it is sold at the market.|Then it comes to our house.|Many people need it every day.]",
    ]  # fmt: skip
    return _write(rng, lines, s)


def job(rng: random.Random) -> str:
    """A day of a character with a profession, in the past tense."""
    j = rng.choice(words.PROFESSIONS)
    s = {"n": j.name, "pl": j.place, "w": j.work, "t": j.tool, "p": j.product, "who": rng.choice(GIRLS)}
    lines = [
        "{who} is a {n}. [She works at {pl}.|Every morning she goes to {pl}.|She has been a {n} for many years.]",
        "[The most important tool of a {n} is the {t}.|She never goes to work without her {t}.|A {n} needs a good {t}.]",
        "[Yesterday she {w}.|Last week she {w} all day.|On Monday she {w}.]",
        "[A child came and asked for a {p}.|Somebody wanted to buy a {p}.|In the afternoon she sold a {p}.]",
        '[She likes her work because she can help people.|It is hard work, but she likes it.|In the evening she is tired and happy.|"I would not want to do anything else," she says.]',
    ]
    return _write(rng, lines, s)


WRITERS: tuple[Callable[[random.Random], str], ...] = (
    animal, animal, animal, country, country, tool, tool, season, causes, causes, opposites, body, origin, job,
)  # fmt: skip


def exposition(rng: random.Random) -> str:
    """One document: one to three paragraphs of plain facts."""
    return "\n\n".join(rng.choice(WRITERS)(rng) for _ in range(rng.choice((1, 1, 2, 3))))
