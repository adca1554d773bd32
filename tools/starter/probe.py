"""Makes the items of the likelihood probe (`trimtab.evaluate.probe_items`): pairs by hand and pairs from word lists.

python -m tools.starter.probe        writes trimtab/evaluate/minimal_pairs.jsonl
"""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path

from tools.starter.general import words
from tools.starter.general.reasoning import COMPARATIVES
from trimtab.evaluate.minimal_pairs import FILE, ProbeItem
from trimtab.facts.randomness import derive
from trimtab.starter.mathematics.words import BOYS, COUNTED, GIRLS, plural

SEED = 8


# Grammar by hand: (right, wrong).
_PAIRS: dict[str, tuple[tuple[str, str], ...]] = {
    "agreement": (
        ("The dogs in the garden are sleeping.", "The dogs in the garden is sleeping."),
        ("The boy with the two kites is happy.", "The boy with the two kites are happy."),
        ("The books on the table were old.", "The books on the table was old."),
        ("The girl and her brother live here.", "The girl and her brother lives here."),
        ("Every child in the village has a hat.", "Every child in the village have a hat."),
        ("The key to the old doors was lost.", "The key to the old doors were lost."),
        ("The birds near the lake sing every morning.", "The birds near the lake sings every morning."),
        ("My mother and father were at home.", "My mother and father was at home."),
        ("The farmer who has two cows works hard.", "The farmer who has two cows work hard."),
        ("The children who live here go to school.", "The children who live here goes to school."),
        ("The old man walks to the market every day.", "The old man walk to the market every day."),
        ("There are many apples in the basket.", "There is many apples in the basket."),
        ("There was a big tree near the house.", "There were a big tree near the house."),
        ("The cat does not like the rain.", "The cat do not like the rain."),
        ("The cats do not like the rain.", "The cats does not like the rain."),
        ("The mice have eaten the cheese.", "The mice has eaten the cheese."),
        ("One of the boys was late.", "One of the boys were late."),
        ("The bread on the plates is warm.", "The bread on the plates are warm."),
    ),
    "determiner": (
        ("She saw an owl in the tree.", "She saw a owl in the tree."),
        ("He ate an apple and a pear.", "He ate a apple and a pear."),
        ("It was a long and cold winter.", "It was an long and cold winter."),
        ("They waited for an hour at the station.", "They waited for a hour at the station."),
        ("She bought these flowers at the market.", "She bought this flowers at the market."),
        ("He read this book last night.", "He read these book last night."),
        ("He saw those boys at school.", "He saw that boys at school."),
        ("We saw many birds on the lake.", "We saw much birds on the lake."),
        ("There was not much water in the well.", "There was not many water in the well."),
        ("He took two loaves of bread.", "He took two loaf of bread."),
        ("She has three children and a dog.", "She has three child and a dog."),
        ("He gave each child one coin.", "He gave each children one coin."),
        ("She put all the apples into one basket.", "She put all the apples into one baskets."),
        ("Both boys ran to the river.", "Both boy ran to the river."),
    ),
    "pronoun": (
        ("The girl looked at herself in the mirror.", "The girl looked at himself in the mirror."),
        ("The boy hurt himself when he fell.", "The boy hurt herself when he fell."),
        ("The children built the house by themselves.", "The children built the house by himself."),
        ("My mother gave the book to me.", "My mother gave the book to I."),
        ("When he and his sister came, it rained.", "When him and his sister came, it rained."),
        ("The teacher told them to sit down.", "The teacher told they to sit down."),
        ("She asked him to open the door.", "She asked he to open the door."),
        ("We went to the park with our dog.", "We went to the park with we dog."),
        ("Anna lost her hat in the wind.", "Anna lost she hat in the wind."),
        ("Tom said that he was tired.", "Tom said that him was tired."),
        ("The bird fed its young in the nest.", "The bird fed it young in the nest."),
        ("I saw them at the market.", "I saw they at the market."),
        ("The old woman smiled when she saw us.", "The old woman smiled when her saw us."),
        ("The man who lives here is kind.", "The man which lives here is kind."),
    ),
    "verb form": (
        ("Yesterday she went to the market.", "Yesterday she go to the market."),
        ("He has eaten all the bread.", "He has ate all the bread."),
        ("They will come back tomorrow.", "They will came back tomorrow."),
        ("She is reading a book about stars.", "She is read a book about stars."),
        ("He did not see the big dog.", "He did not saw the big dog."),
        ("She wanted to help her friend.", "She wanted to helped her friend."),
        ("They were playing in the snow.", "They were play in the snow."),
        ("He can swim across the lake.", "He can swims across the lake."),
        ("The letter was written by my aunt.", "The letter was wrote by my aunt."),
        ("She had never seen the sea before.", "She had never saw the sea before."),
        ("Did you find the key?", "Did you found the key?"),
        ("He stopped to look at the sky.", "He stopped to looking at the sky."),
        ("The door was closed by the wind.", "The door was close by the wind."),
        ("He made his brother laugh.", "He made his brother laughed."),
    ),
    "word order": (
        ("The small bird sat on the old tree.", "The bird small sat on the tree old."),
        ("She gave her friend a red ball.", "She gave a red ball her friend."),
        ("He does not like cold soup.", "He not does like cold soup."),
        ("Where did you put the key?", "Where you did put the key?"),
        ("They have already gone home.", "They already have home gone."),
        ("The man opened the door slowly.", "The man the door opened slowly."),
        ("She was very happy about the gift.", "She very was happy about the gift."),
        ("I have never been to the city.", "I have been never the city to."),
        ("He put the book on the table.", "He put on the table book the."),
        ("The girl with the red hat laughed.", "The girl the red hat with laughed."),
        ("It was too dark to see anything.", "It was dark too to see anything."),
        ("What a beautiful day it is!", "What beautiful a day it is!"),
        ("He asked me what my name was.", "He asked me my what name was."),
        ("They walked along the river for an hour.", "They walked the river along an hour for."),
    ),
    "transitivity": (
        ("The boy found the key.", "The boy fell the key."),
        ("The baby slept all night.", "The baby carried all night."),
        ("She opened the window.", "She smiled the window."),
        ("He laughed at the funny hat.", "He wore at the funny hat."),
        ("The girl ate the cake.", "The girl arrived the cake."),
        ("The sun rose over the hill.", "The sun brought over the hill."),
        ("They built a little house.", "They came a little house."),
        ("The old man sat on the bench.", "The old man took on the bench."),
        ("She gave him a book.", "She slept him a book."),
        ("The dog ran to the door.", "The dog held to the door."),
        ("He told her a story.", "He fell her a story."),
        ("The snow fell on the roof.", "The snow found on the roof."),
    ),
    "common sense": (
        ("It rained all day, so the ground was wet.", "It rained all day, so the ground was dry."),
        ("The fire went out, and the room grew cold.", "The fire went out, and the room grew hot."),
        ("He was very tired, so he went to bed.", "He was very tired, so he went to school."),
        ("She lost her toy, so she was sad.", "She lost her toy, so she was glad."),
        ("The water was so cold that it turned to ice.", "The water was so cold that it turned to steam."),
        ("Fish live in water.", "Fish live in trees."),
        ("The opposite of big is small.", "The opposite of big is green."),
        ("A bird can fly with its wings.", "A bird can fly with its eggs."),
        ("We see with our eyes.", "We see with our ears."),
        ("In winter it is cold.", "In winter it is hot."),
        ("The glass fell and broke.", "The glass fell and grew."),
        ("He was hungry, so he ate some bread.", "He was hungry, so he ate some stones."),
        ("The night was dark, so she took a lamp.", "The night was dark, so she took a spoon."),
        ("At night we can see the stars.", "At night we can see the sun."),
    ),
}  # fmt: skip


def _order(rng: random.Random) -> ProbeItem:
    a, b, c = rng.sample(GIRLS + BOYS, 3)
    more, _, most = rng.choice(COMPARATIVES)
    if rng.random() < 0.5:
        context = f"{a} is {more} than {b}. {b} is {more} than {c}. So {a} is {more} than"
        return ProbeItem("reasoning: order", context, (f" {c}.", f" {a}."))
    context = f"{a} is {more} than {b}. {b} is {more} than {c}. The {most} of the three is"
    return ProbeItem("reasoning: order", context, (f" {a}.", f" {rng.choice((b, c))}."))


def _place(rng: random.Random) -> ProbeItem:
    a, b = rng.sample(GIRLS + BOYS, 2)
    p, q = rng.sample([place for place in words.PLACES if place.count(" ") == 1], 2)
    thing, other = rng.sample(words.TOYS, 2)
    if rng.random() < 0.5:
        context = f"{a} was at {p}. Then {a} walked to {q}. Where is {a} now? {a} is at"
        return ProbeItem("reasoning: place", context, (f" {q}.", f" {p}."))
    context = f"{a} took the {thing}, and {b} took the {other}. Who has the {other}?"
    return ProbeItem("reasoning: place", context, (f" {b} has it.", f" {a} has it."))


def _counting(rng: random.Random) -> ProbeItem:
    kind = rng.randrange(3)
    if kind == 0:
        n = rng.randint(2, 14)
        wrong = rng.choice([i for i in range(1, 17) if abs(i - n) > 1])
        return ProbeItem(
            "order of things",
            f"After {words.NUMBERS[n]} comes",
            (f" {words.NUMBERS[n + 1]}.", f" {words.NUMBERS[wrong]}."),
        )
    names, what = (words.DAYS, "The day after {} is") if kind == 1 else (words.MONTHS, "After {} comes")
    i = rng.randrange(len(names))
    right = names[(i + 1) % len(names)]
    wrong_name = rng.choice([n for n in names if n not in (right, names[i])])
    return ProbeItem("order of things", what.format(names[i]), (f" {right}.", f" {wrong_name}."))


def _arithmetic(rng: random.Random) -> ProbeItem:
    while True:
        kind = rng.randrange(3)
        a, b = rng.randint(2, 30), rng.randint(2, 9)
        if kind == 0:
            text, right = f"{a} + {b}", a + b
        elif kind == 1:
            text, right = f"{a + b} - {b}", a
        else:
            a = rng.randint(2, 9)
            text, right = f"{a} × {b}", a * b
        wrong = right + rng.choice((-10, -3, -2, -1, 1, 2, 3, 10))
        # As many digits as the right answer has, or length alone would tell.
        if wrong >= 0 and len(str(wrong)) == len(str(right)):
            return ProbeItem("arithmetic", f"{text} =", (f" {right}.", f" {wrong}."))


def _plural(rng: random.Random) -> ProbeItem:
    noun = rng.choice([n for n in COUNTED if n not in ("sheep",)])
    number = words.NUMBERS[rng.randint(2, 12)]
    name = rng.choice(GIRLS + BOYS)
    return ProbeItem("plural", f"{name} has {number}", (f" {plural(noun)} in a box.", f" {noun} in a box."))


def make_items() -> list[ProbeItem]:
    """All items, always the same.

    Example:
        >>> len(make_items())
        220
    """
    items = [ProbeItem(kind, "", pair) for kind, pairs in _PAIRS.items() for pair in pairs]
    for make, count in ((_plural, 16), (_order, 24), (_place, 20), (_counting, 20), (_arithmetic, 40)):
        rng = random.Random(derive(SEED, "probe", make.__name__))
        made: dict[ProbeItem, None] = {}
        while len(made) < count:
            made[make(rng)] = None
        items += made
    return items


# These are knowledge that training must teach, such as the days of the week; there is no other way to say them.
_TAUGHT = ("order of things", "arithmetic")
_OPENING_WORDS = 5


@cache
def held_out_phrases() -> tuple[str, ...]:
    """Phrases that no generated training text may contain: the right texts, up to the word that differs in wrong ones.

    A beginning of fewer than five words ("There are many") is too common: then the whole sentence is the phrase.

    Example:
        >>> "The dogs in the garden are" in held_out_phrases()
        True
    """
    found: dict[str, None] = {}
    for item in make_items():
        if item.kind in _TAUGHT:
            continue
        right, wrong = ((item.context + ending).split() for ending in item.alternatives)
        parted = next(i for i, (a, b) in enumerate(zip(right, wrong, strict=True)) if a != b) + 1
        found[" ".join(right[:parted] if parted >= _OPENING_WORDS else right)] = None
    return tuple(found)


def write_items(path: Path = FILE) -> None:
    """Writes the items, one JSON object per line."""
    lines = (
        json.dumps(
            {"kind": item.kind, "context": item.context, "alternatives": item.alternatives},
            ensure_ascii=False,
        )
        for item in make_items()
    )
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    write_items()
