"""Characters and things, with the forms of their names that sentences need."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tools.starter.general import words
from trimtab.starter.mathematics.words import BOYS, GIRLS


@dataclass(frozen=True, slots=True)
class Person:
    """A character: every form a template may ask for.

    `name` is used in the narration ("Mia", "the fox", "I"), `call` when others speak to them ("Mia", "Fox").
    """

    name: str
    call: str
    kind: str
    he: str
    him: str
    his: str
    himself: str

    @property
    def He(self) -> str:
        return self.he[0].upper() + self.he[1:]

    @property
    def His(self) -> str:
        return self.his[0].upper() + self.his[1:]

    @property
    def Name(self) -> str:
        return self.name[0].upper() + self.name[1:]

    @property
    def possessive(self) -> str:
        if self.name == "I":
            return "my"
        return self.name + ("'" if self.name.endswith("s") else "'s")

    @property
    def obj(self) -> str:
        """The name after a verb or a preposition: "me" for the narrator."""
        return self.him if self.name == "I" else self.name

    @property
    def a(self) -> str:
        """The first mention, with the indefinite article: "a fox"."""
        return f"a {self.kind}"

    @property
    def the(self) -> str:
        return self.name

    def __str__(self) -> str:
        return self.name


_FORMS = {"she": ("her", "her", "herself"), "he": ("him", "his", "himself"), "it": ("it", "its", "itself")}


def person(name: str, kind: str, he: str, call: str | None = None) -> Person:
    """A character from a name and a pronoun."""
    return Person(name, call or name, kind, he, *_FORMS[he])


def child(rng: random.Random, *, other_than: tuple[Person, ...] = ()) -> Person:
    """A girl or a boy whose name is not taken; the other sex first, so that pronouns stay clear."""
    taken = {p.call for p in other_than}
    girl = rng.random() < 0.5
    if other_than and other_than[0].he in ("he", "she") and rng.random() < 0.8:
        girl = other_than[0].he == "he"
    while True:
        name = rng.choice(GIRLS if girl else BOYS)
        if name not in taken:
            return person(name, "girl" if girl else "boy", "she" if girl else "he")


def narrator(rng: random.Random) -> Person:
    """The hero who tells the story: I, me, my. `call` is the name that others use."""
    girl = rng.random() < 0.5
    name = rng.choice(GIRLS if girl else BOYS)
    return Person("I", name, "girl" if girl else "boy", "I", "me", "my", "myself")


def adult(rng: random.Random, hero: Person | None = None) -> Person:
    """A grown-up: a relation of the hero or a neighbour."""
    if hero is not None and rng.random() < 0.6:
        word, he = rng.choice(words.RELATIONS)
        name = f"{hero.his} {word}" if hero.name == "I" or rng.random() < 0.5 else f"{hero.possessive} {word}"
        return person(name, "woman" if he == "she" else "man", he, word.capitalize())
    title, he = rng.choice((("Mrs.", "she"), ("Mr.", "he"), ("Miss", "she")))
    name = f"{title} {rng.choice(words.SURNAMES)}"
    return person(name, "woman" if he == "she" else "man", he)


def worker(rng: random.Random) -> tuple[Person, words.Profession]:
    """A character with a profession: the baker, the farmer, …"""
    job = rng.choice(words.PROFESSIONS)
    he = rng.choice(("she", "he"))
    return person(f"the {job.name}", "woman" if he == "she" else "man", he, job.name.capitalize()), job


def animal(rng: random.Random, *, other_than: tuple[Person, ...] = ()) -> Person:
    """A talking animal of a fable: "the fox" in the narration, "Fox" when spoken to."""
    taken = {p.kind for p in other_than}
    while True:
        kind = rng.choice(words.FABLE_ANIMALS)
        if kind not in taken:
            he = rng.choice(("she", "he"))
            if other_than and other_than[0].he in ("he", "she") and rng.random() < 0.8:
                he = "she" if other_than[0].he == "he" else "he"
            return person(f"the {kind}", kind, he, kind.capitalize())


def pet(rng: random.Random) -> Person:
    """A dog, cat, … with a name of its own."""
    kind = rng.choice(words.PETS)
    return person(rng.choice(words.PET_NAMES), kind, rng.choice(("he", "she")))


@dataclass(frozen=True, slots=True)
class Thing:
    """An object of the story with one adjective it keeps."""

    noun: str
    adjective: str

    @property
    def the(self) -> str:
        return f"the {self.noun}"

    @property
    def The(self) -> str:
        return f"the {self.adjective} {self.noun}"

    @property
    def a(self) -> str:
        return f"a {self.adjective} {self.noun}"

    def __str__(self) -> str:
        return self.noun


def thing(rng: random.Random, nouns: tuple[str, ...] = words.TOYS) -> Thing:
    """A thing from a list, with a colour, a size or another quality."""
    return Thing(rng.choice(nouns), rng.choice(rng.choice((words.COLOURS, words.THING_QUALITIES))))
