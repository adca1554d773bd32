"""Plots of stories, and the scene of a story: its characters, places and things."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from tools.starter.general import people, tables, words
from tools.starter.general.grammar import Grammar
from trimtab.starter.mathematics.words import BOYS, GIRLS

Beat = str | tuple[float, str]
PLOT_FILES = ("home", "outside", "fable", "days")


class Phrase(str):
    """A piece of a sentence that can also begin one."""

    __slots__ = ()

    @property
    def cap(self) -> str:
        return self[:1].upper() + self[1:]


@dataclass(frozen=True)
class Plot:
    """A story: its beats in order, each a template or (probability, template).

    `cast` says who may play it: "any", "human", "child", "animal", "worker", "letter". `rows` are
    alternatives of which the story takes one; their parts fill the slots `prefix`0, `prefix`1, …
    """

    name: str
    cast: str
    beats: list[Beat]
    rows: tuple[tuple[str, ...], ...] = ()
    prefix: str = ""


def read_plots() -> tuple[Plot, ...]:
    """Every plot of the files in `plots/`."""
    return tuple(_plot(entry) for name in PLOT_FILES for entry in tables.read(f"plots/{name}")["plot"])


def _plot(entry: dict[str, Any]) -> Plot:
    beats = [b if isinstance(b, str) else (b["chance"], b["text"]) for b in entry["beats"]]
    rows = tuple(tuple(row) for row in entry.get("rows", ()))
    return Plot(entry["name"], entry["cast"], beats, rows, entry.get("prefix", ""))


_RULES = tables.read("rules")
_FILL, _MORALS = _RULES["fill"], _RULES["morals"]
_PRONOUNS = (
    {"they": "they", "them": "them", "their": "their"},
    {"they": "we", "them": "us", "their": "our"},
)
_IN = tuple(_FILL["inside"])
_ON = ("hill", "bridge", "farm", "island", "mountain")


class Place(str):
    """A place with its preposition: "at the lake", "in the forest"."""

    __slots__ = ()

    @property
    def at(self) -> str:
        if self.endswith(_IN):
            return f"in {self}"
        return f"on {self}" if self.endswith(_ON) else f"at {self}"


def _cast(kind: str, rng: random.Random) -> tuple[str, people.Person]:
    """Who plays the hero, and which kind of introduction they get."""
    if kind == "any":
        kind = "animal" if rng.random() < 0.3 else "human"
    if kind == "human":
        kind = "narrator" if rng.random() < 0.22 else "child"
    if kind in ("narrator", "letter"):
        return kind, people.narrator(rng)
    if kind == "animal":
        return kind, people.animal(rng)
    if kind == "worker":
        return kind, people.worker(rng)[0]
    return kind, people.child(rng)


def scene(plot: Plot, rng: random.Random) -> tuple[str, dict[str, Any]]:
    """The introduction kind and every slot that any template may use, chosen to fit together."""
    kind, hero = _cast(plot.cast, rng)
    animals = kind == "animal"
    friend = people.animal(rng, other_than=(hero,)) if animals else people.child(rng, other_than=(hero,))
    elder = people.person("the old owl", "owl", "she", "Owl") if animals else people.adult(rng, hero)
    victim = _victim(rng, (hero, friend))
    hides = rng.sample(words.HIDING_PLACES, 3)
    place = rng.choice(words.PLACES)
    numbers = rng.sample(range(3, 10), 2)
    items = rng.sample(words.FOODS, 3)
    job = rng.choice(words.PROFESSIONS)
    if kind == "worker":
        job = next(j for j in words.PROFESSIONS if hero.name == f"the {j.name}")
    # The order of these lines is the order of the random draws: changing it changes every story.
    return kind, {
        "hero": hero,
        "friend": friend,
        "elder": elder,
        "victim": victim,
        "pet": people.pet(rng),
        "job": job,
        "thing": people.thing(rng),
        "place": Place(place),
        "moral": rng.choice(_MORALS.get(plot.name, _MORALS["any"])),
        "wild": Place(rng.choice(words.WILD_PLACES)),
        "hide1": hides[0],
        "hide2": hides[1],
        "hide3": hides[2],
        "junk": rng.choice(_FILL["junk"]),
        "food": rng.choice(words.FOODS),
        "age": words.NUMBERS[rng.randint(5, 11)],
        "num1": words.NUMBERS[max(numbers) + 3],
        "num2": words.NUMBERS[min(numbers)],
        "items": f"{items[0]}, {items[1]} and {items[2]}",
        "item1": items[0],
        "item2": items[1],
        "item3": items[2],
        "month": rng.choice(words.MONTHS),
        "topic": rng.choice(_FILL["topics"]),
        "a_story": rng.choice(_FILL["stories"]),
        "big": rng.choice(_FILL["big"]),
        "small": rng.choice(_FILL["small"]),
        "worker_name": rng.choice(GIRLS if hero.he == "she" else BOYS),
        **_PRONOUNS[kind in ("narrator", "letter")],
    }


_VICTIMS = (
    ("old man", "he"),
    ("old woman", "she"),
    ("young sailor", "he"),
    ("little girl", "she"),
    ("merchant", "he"),
    ("traveler", "she"),
    ("small boy", "he"),
)


def _victim(rng: random.Random, taken: tuple[people.Person, ...]) -> people.Person:
    if rng.random() < 0.5:
        return people.animal(rng, other_than=taken)
    kind, he = rng.choice(_VICTIMS)
    return people.person(f"the {kind}", kind, he)


def fill_row(plot: Plot, slots: dict[str, Any], grammar: Grammar, rng: random.Random) -> None:
    """Adds one of the plot's rows to the scene, its own slots filled first."""
    rows = plot.rows
    for i, part in enumerate(rng.choice(rows) if rows else ()):
        slots[f"{plot.prefix}{i}"] = Phrase(grammar.expand(part, slots, rng))
