"""Descriptions of scenes in the present or past tense, to train agreement of number.

Stories have one hero and the past tense. Here half of the subjects are singular and half plural, often with a noun
of the other number between subject and verb.
"""

from __future__ import annotations

import random
from typing import Any

from tools.starter.general import tables, words
from tools.starter.general.agree import Group
from tools.starter.general.grammar import Grammar, polish
from trimtab.starter.mathematics.words import COUNTED, plural

_TABLE = tables.read("settings")
SETTINGS: list[dict[str, Any]] = _TABLE["settings"]
SENTENCES: dict[str, list[str]] = _TABLE["sentences"]
_PEOPLE = _TABLE["people"]
_WORKERS = frozenset(_PEOPLE["workers"])
_ANIMALS = words.PETS + words.FABLE_ANIMALS
_ELSEWHERE = {
    "who": _ANIMALS,
    "things": words.TOYS + tuple(n for n in COUNTED if n not in (*_ANIMALS, "sheep")),
}
_G = Grammar({})


def _place(rng: random.Random, marks: list[str], many: bool, person: bool) -> str:
    """A phrase after the noun; its own noun mostly has the other number than the subject."""
    other = (not many) if rng.random() < 0.75 else many
    if person and not many and rng.random() < 0.5:
        thing = rng.choice(_PEOPLE["belongings"])
        return f"with the {plural(thing)}" if other else f"with the {thing}"
    mark = rng.choice(marks)
    return f"{rng.choice(_PEOPLE['near'])} the {plural(mark) if other else mark}"


def _being(
    rng: random.Random, setting: dict[str, Any], row: list[str], many: bool, past: bool, gender: str = ""
) -> Group:
    noun, *_, acts = row
    person = bool(gender) or noun in _WORKERS
    good, other = rng.sample(_PEOPLE["adjectives"], 2)
    return Group(
        noun,
        many,
        past,
        gender or (rng.choice(("he", "she")) if person else "it"),
        rng.choice(_PEOPLE["numbers"]),
        [_place(rng, setting["marks"], many, person) for _ in range(3)],
        acts.split("|"),
        (good, other),
    )


def _things(rng: random.Random, setting: dict[str, Any], row: list[str], many: bool, past: bool) -> Group:
    good, other = rng.sample(row[1].split("|"), 2)
    return Group(
        row[0],
        many,
        past,
        number=rng.choice(_PEOPLE["numbers"]),
        places=[_place(rng, setting["marks"], many, person=False) for _ in range(2)],
        adjectives=(good, other),
    )


def _two(rng: random.Random, setting: dict[str, Any], kind: str) -> list[list[str]]:
    """Two different rows of the place; one in three is a noun of the other word lists instead.

    Agreement would otherwise be tied to the few nouns of a place.
    """
    while True:
        rows = [
            row if rng.random() < 0.65 else [rng.choice(_ELSEWHERE[kind]), _PEOPLE[f"any_{kind}"]]
            for row in rng.sample(setting[kind], 2)
        ]
        if rows[0][0] != rows[1][0]:
            return rows


def picture_scene(rng: random.Random, setting: dict[str, Any], past: bool) -> dict[str, Any]:
    """Everything the sentences of `settings.toml` may name."""
    several, either = _two(rng, setting, "who")
    one, second = rng.sample(_PEOPLE["rows"], 2)
    thing, things = _two(rng, setting, "things")
    p = _being(rng, setting, several, many=True, past=past)
    s = _being(rng, setting, one, many=False, past=past, gender=one[1])
    a = _being(rng, setting, either, many=rng.random() < 0.5, past=past)
    x = _things(rng, setting, thing, rng.random() < 0.5, past)
    q = _things(rng, setting, things, many=True, past=past)
    whose = s.their if second[0] in _PEOPLE["relations"] else rng.choice(("a", "the"))
    t = s.called(f"the {one[0]} and {whose} {second[0]}", many=True)
    o = p.called(f"one of the {p.more}", many=False)
    mass = rng.choice(setting["mass"])
    groups = {"p": p, "s": s, "a": a, "x": x, "q": q, "t": t, "o": o}
    return {
        **groups,
        **{name.upper(): group.now() for name, group in groups.items()},
        "x_one": q.called(f"one of the {q.more}", many=False),
        "m_": Group(mass, False, past),
        "m": mass,
        "bs": plural(rng.choice(_PEOPLE["belongings"])),
        "at": setting["at"],
        "place": setting["place"],
    }


def picture(rng: random.Random) -> str:
    """A place and who and what is there, in five to twelve sentences.

    Example:
        >>> picture(random.Random(3)) == picture(random.Random(3))
        True
    """
    past = rng.random() < 0.4
    slots = picture_scene(rng, rng.choice(SETTINGS), past)
    frame = _TABLE["past" if past else "present"]
    counts = {"p": rng.randint(1, 3), "s": rng.randint(1, 3), "a": rng.randint(1, 2), "x": rng.randint(1, 3)}
    parts = [[rng.choice(frame["opening"])]]
    parts += [rng.sample(SENTENCES[kind], count) for kind, count in counts.items()]
    if rng.random() < 0.5:
        parts.append(rng.sample(SENTENCES["talk"], rng.randint(1, 2)))
    middle = parts[1:]
    rng.shuffle(middle)
    lines = []
    for line in [parts[0][0], *(line for part in middle for line in part), rng.choice(frame["ending"])]:
        for name in "psaxq":
            slots[name].vary(rng)
        lines.append(_G.expand(line, slots, rng))
    return polish(" ".join(lines))
