"""Noun phrases that carry their number and tense, so that a template's verbs and pronouns agree with them.

    {p.the} {p.be} {p.adj1}        the hens are hungry, the hen was hungry
    {p.far} {p.act1}               the hens near the gate peck at the corn

One template then shows singular and plural, present and past, with and without a distractor in between.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from tools.starter.general import tables
from trimtab.starter.mathematics.words import plural

_VERBS = tables.read("settings")["verbs"]
PAST: dict[str, str] = _VERBS["past"]
DOUBLED = frozenset(_VERBS["doubled"])
REGULAR = frozenset(_VERBS["regular"])
_PRONOUNS = {
    "he": ("him", "his", "himself"),
    "she": ("her", "her", "herself"),
    "it": ("it", "its", "itself"),
    "they": ("them", "their", "themselves"),
}
_IRREGULAR_PRESENT = {
    "be": ("is", "are"),
    "have": ("has", "have"),
    "do": ("does", "do"),
    "go": ("goes", "go"),
}


def _stem(verb: str) -> str:
    """The verb before -ed or -ing: "stopp", "dry", "bak"."""
    if verb in DOUBLED:
        return verb + verb[-1]
    return verb if verb == "be" or verb.endswith("ee") else verb.removesuffix("e")


def conjugate(verb: str, *, many: bool, past: bool) -> str:
    """The form of a verb for a subject in the third person.

    Example:
        >>> conjugate("carry", many=False, past=False), conjugate("be", many=True, past=True)
        ('carries', 'were')
    """
    if verb == "be":
        return ("was", "were")[many] if past else ("is", "are")[many]
    soft_y = verb.endswith("y") and verb[-2] not in "aeiou"
    if past:
        return PAST.get(verb) or (f"{verb[:-1]}ied" if soft_y else f"{_stem(verb)}ed")
    if verb in _IRREGULAR_PRESENT:
        return _IRREGULAR_PRESENT[verb][many]
    if many:
        return verb
    if soft_y:
        return f"{verb[:-1]}ies"
    return verb + ("es" if verb.endswith(("s", "x", "z", "ch", "sh", "o")) else "s")


def progressive(verb: str) -> str:
    """The -ing form.

    Example:
        >>> progressive("run"), progressive("bake"), progressive("lie")
        ('running', 'baking', 'lying')
    """
    return f"{verb[:-2]}ying" if verb.endswith("ie") else f"{_stem(verb)}ing"


@dataclass(frozen=True)
class Group:
    """One or more of a kind: what they are called, what they do, how they are, and where.

    Attributes that are not written out here and name a known verb give that verb, agreeing.
    """

    noun: str
    many: bool
    past: bool = False
    gender: str = "it"
    number: str = "two"
    places: list[str] = field(default_factory=list)
    acts: list[str] = field(default_factory=list)
    adjectives: tuple[str, str] = ("old", "new")
    name: str = ""

    def __getattr__(self, attribute: str) -> str:
        if attribute in PAST or attribute in DOUBLED or attribute in REGULAR:
            return conjugate(attribute, many=self.many, past=self.past)
        raise AttributeError(attribute)

    def vary(self, rng: random.Random) -> None:
        """Another thing to do and another place, for the next sentence; copies of the group share them."""
        rng.shuffle(self.acts)
        rng.shuffle(self.places)

    @property
    def place(self) -> str:
        return self.places[0]

    def now(self) -> Group:
        """The same in the present tense, for what people say."""
        return replace(self, past=False)

    def called(self, name: str, *, many: bool) -> Group:
        """Another subject around the same noun: "one of the hens", "the boy and his sister"."""
        return replace(self, name=name, many=many)

    @property
    def one(self) -> str:
        return self.noun

    @property
    def more(self) -> str:
        return plural(self.noun)

    @property
    def kind(self) -> str:
        return self.more if self.many else self.noun

    @property
    def the(self) -> str:
        return self.name or f"the {self.kind}"

    @property
    def far(self) -> str:
        """With a place or a possession between the subject and its verb."""
        return f"{self.the} {self.place}".strip()

    @property
    def some(self) -> str:
        return f"{self.number} {self.more}" if self.many else f"a {self.noun}"

    @property
    def some_adj(self) -> str:
        adjective = self.adjectives[0]
        return f"{self.number} {adjective} {self.more}" if self.many else f"a {adjective} {self.noun}"

    @property
    def this(self) -> str:
        return f"these {self.more}" if self.many else f"this {self.noun}"

    @property
    def that(self) -> str:
        return f"those {self.more}" if self.many else f"that {self.noun}"

    @property
    def who(self) -> str:
        return "that" if self.gender == "it" else "who"

    @property
    def here(self) -> str:
        """Pointing without the noun: "this" or "these"."""
        return "these" if self.many else "this"

    @property
    def they(self) -> str:
        return "they" if self.many else self.gender

    @property
    def them(self) -> str:
        return _PRONOUNS[self.they][0]

    @property
    def their(self) -> str:
        return _PRONOUNS[self.they][1]

    @property
    def self(self) -> str:
        return _PRONOUNS[self.they][2]

    @property
    def adj1(self) -> str:
        return self.adjectives[0]

    @property
    def adj2(self) -> str:
        return self.adjectives[1]

    def _phrase(self, i: int) -> tuple[str, str]:
        """The verb and the rest, with "its tail" made "their tails" where there are several."""
        verb, _, rest = self.acts[i].partition(" ")
        head, own, noun = rest.rpartition("its ")
        if own and self.many:
            rest = f"{head}their {noun if noun.endswith('s') else plural(noun)}"
        return verb, rest

    def _act(self, i: int) -> str:
        verb, rest = self._phrase(i)
        return f"{conjugate(verb, many=self.many, past=self.past)} {rest}".strip()

    def _acting(self, i: int) -> str:
        verb, rest = self._phrase(i)
        return f"{progressive(verb)} {rest}".strip()

    @property
    def act1(self) -> str:
        return self._act(0)

    @property
    def act2(self) -> str:
        return self._act(1)

    @property
    def acting1(self) -> str:
        return self._acting(0)

    @property
    def plain1(self) -> str:
        return " ".join(self._phrase(0)).strip()

    @property
    def plain2(self) -> str:
        return " ".join(self._phrase(1)).strip()
