"""Names, countable nouns and plurals of the word problems, used at run time and by the corpus generators."""

from __future__ import annotations

GIRLS = (
    "Mia", "Anna", "Lily", "Emma", "Sara", "Lucy", "Nora", "Ella", "Clara", "Rosa", "Amy", "Jane", "Kate",
    "Lena", "Maya", "Ruby", "Zoe", "Alice", "Grace", "Ivy", "Tina", "Molly", "Hannah", "Julia", "Eva", "Nina",
    "Sophie", "Mary", "Daisy", "Olive", "Leila", "Priya", "Fatima", "Aiko", "Carmen", "Ingrid", "Bella", "Dora",
    "Esther", "Freya", "Gina", "Holly", "Iris", "June", "Kira", "Lola", "Mabel", "Nadia", "Opal", "Paula",
    "Rita", "Stella", "Tara", "Uma", "Vera", "Wendy", "Yara",
)  # fmt: skip
BOYS = (
    "Tom", "Ben", "Sam", "Max", "Leo", "Jack", "Tim", "Noah", "Finn", "Adam", "Paul", "Peter", "Oscar", "Henry",
    "Luke", "Hugo", "Eric", "David", "Daniel", "Omar", "Ravi", "Kenji", "Carlos", "Ivan", "Theo", "Felix",
    "George", "Simon", "Jacob", "Will", "Owen", "Ali", "Marco", "Anton", "Bruno", "Carl", "Dan", "Edwin",
    "Frank", "Gus", "Harry", "Ian", "Joe", "Karl", "Louis", "Miles", "Ned", "Otto", "Pedro", "Ralph", "Samir",
    "Tobias", "Victor", "Walter", "Yusuf", "Zack",
)  # fmt: skip
COUNTED = (
    "apple", "pear", "egg", "book", "coin", "flower", "stone", "shell", "cookie", "marble", "button", "pencil",
    "carrot", "plum", "orange", "cup", "candle", "chair", "kitten", "duck", "hen", "boat", "tree", "star",
    "leaf", "nut", "berry", "bottle", "box", "letter", "picture", "spoon", "hat", "sheep", "goose", "mouse",
    "potato",
)  # fmt: skip
_IRREGULAR_PLURALS = {
    "child": "children", "man": "men", "woman": "women", "mouse": "mice", "goose": "geese", "foot": "feet",
    "tooth": "teeth", "sheep": "sheep", "fish": "fish", "deer": "deer", "leaf": "leaves", "knife": "knives",
    "wolf": "wolves", "loaf": "loaves", "shelf": "shelves", "scarf": "scarves", "calf": "calves",
    "person": "people", "ox": "oxen", "thief": "thieves", "wife": "wives", "life": "lives", "half": "halves",
    "potato": "potatoes", "tomato": "tomatoes", "mango": "mangoes", "hero": "heroes", "moose": "moose",
    "fisherman": "fishermen",
}  # fmt: skip


def plural(noun: str) -> str:
    """The plural of an English noun, the last word of a phrase changed.

    Example:
        >>> plural("red berry"), plural("bus"), plural("goose")
        ('red berries', 'buses', 'geese')
    """
    head, _, last = noun.rpartition(" ")
    if last in _IRREGULAR_PLURALS:
        last = _IRREGULAR_PLURALS[last]
    elif last.endswith(("s", "x", "z", "ch", "sh")):
        last += "es"
    elif last.endswith("y") and last[-2] not in "aeiou":
        last = last[:-1] + "ies"
    else:
        last += "s"
    return f"{head} {last}".strip()
