"""Word lists for the generated stories: places, things, foods, professions (`words.toml`).

Names and countable nouns are those of the word problems (`trimtab.starter.mathematics.words`).
"""

from __future__ import annotations

from typing import NamedTuple

from tools.starter.general import tables

_LISTS = tables.read("words")


class Profession(NamedTuple):
    """A profession: where it is done, what was done there, its tool, and what people take home."""

    name: str
    place: str
    work: str
    tool: str
    product: str


def _list(name: str) -> tuple[str, ...]:
    return tuple(_LISTS[name])


SURNAMES = _list("surnames")
RELATIONS = tables.rows(_LISTS["relations"])
PETS = _list("pets")
PET_NAMES = _list("pet_names")
FABLE_ANIMALS = _list("fable_animals")
COLOURS = _list("colours")
THING_QUALITIES = _list("thing_qualities")
TOYS = _list("toys")
PLACES = _list("places")
WILD_PLACES = _list("wild_places")
HIDING_PLACES = _list("hiding_places")
FOODS = _list("foods")
NUMBERS = _list("numbers")
DAYS = _list("days")
MONTHS = _list("months")
PROFESSIONS = tuple(Profession(*row) for row in _LISTS["jobs"])
