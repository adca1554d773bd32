"""A small template grammar: sentences with choices, rules and slots; corrects articles, spaces and capitals.

    [walked|ran|[slowly |]crept]   one of the alternatives, at random; they nest, and may be empty
    {hero} {hero.his} {toy.the}    a slot of the scene, or an attribute of it
    <feeling_sad>                  another rule, by name

Templates are parsed once and cached; rendering is a walk over nested tuples, fast enough to write megabytes per
second. "a"/"an" and capitals are corrected after the choices are made, so that templates need not contain them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

Node = tuple[str, Any]

_TOKEN = re.compile(r"[\[\]|]|\{[^{}]+\}|<[a-z_]+>|[^\[\]|{}<>]+")
# The letter after "a" decides; these begin with another sound than their letter says.
_VOWEL_SOUND = re.compile(
    r"(?i)^(?:[aeio]|u(?!ni(?![mn])|se|su|til|ra)|hour|honest|honou?r|heir)(?!ne\b|nce\b|u[rp]o)"
)
_ARTICLE = re.compile(r"\b([Aa])n? (?=([A-Za-z]+))")
_SENTENCE_START = re.compile(r"(^|[.!?] +|\n+|[.]\" +|(?:^|[\s(])\")([a-z])")
_SPACES = re.compile(r" {2,}")
_LOOSE = re.compile(r" +([,.;!?])")


@cache
def parse(template: str) -> tuple[Node, ...]:
    """The template as nodes: ("text", s), ("slot", (name, attribute)), ("rule", name), ("choice", nodes)."""
    tokens = _TOKEN.findall(template)
    assert "".join(tokens) == template, f"stray bracket in template: {template!r}"
    nodes, rest = _parse_sequence(tokens, 0)
    assert rest == len(tokens), f"unbalanced bracket in template: {template!r}"
    return nodes


def _parse_sequence(tokens: list[str], i: int) -> tuple[tuple[Node, ...], int]:
    nodes: list[Node] = []
    while i < len(tokens) and tokens[i] not in ("|", "]"):
        token = tokens[i]
        i += 1
        if token == "[":
            options = []
            while True:
                option, i = _parse_sequence(tokens, i)
                options.append(option)
                assert i < len(tokens), "a choice is not closed"
                i += 1
                if tokens[i - 1] == "]":
                    break
            nodes.append(("choice", tuple(options)))
        elif token[0] == "{":
            name, _, attribute = token[1:-1].partition(".")
            nodes.append(("slot", (name, attribute)))
        elif token[0] == "<":
            nodes.append(("rule", token[1:-1]))
        else:
            nodes.append(("text", token))
    return tuple(nodes), i


class Grammar:
    """Named rules (lists of templates) rendered with a random source.

    Example:
        >>> g = Grammar({"greet": ["hello", "good morning"]})
        >>> g.sentence("<greet>, {who}.", {"who": "Ann"}, random.Random(1)) in (
        ...     "Hello, Ann.", "Good morning, Ann.")
        True
    """

    def __init__(self, rules: Mapping[str, list[str]]) -> None:
        self.rules = {name: [parse(t) for t in templates] for name, templates in rules.items()}

    def expand(self, template: str, scene: Mapping[str, Any], rng: random.Random) -> str:
        """The template with every choice, rule and slot filled in, before capitals and articles."""
        out: list[str] = []
        self._walk(parse(template), scene, rng.random, out)
        return "".join(out)

    def sentence(self, template: str, scene: Mapping[str, Any], rng: random.Random) -> str:
        """`expand` followed by `polish`."""
        return polish(self.expand(template, scene, rng))

    def _walk(self, nodes: tuple[Node, ...], scene: Mapping[str, Any], uniform: Any, out: list[str]) -> None:
        for kind, value in nodes:
            if kind == "text":
                out.append(value)
            elif kind == "slot":
                name, attribute = value
                out.append(str(getattr(scene[name], attribute) if attribute else scene[name]))
            elif kind == "choice":
                self._walk(value[int(uniform() * len(value))], scene, uniform, out)
            else:
                options = self.rules[value]
                self._walk(options[int(uniform() * len(options))], scene, uniform, out)


def polish(text: str) -> str:
    """Spaces, articles and capitals put right.

    Example:
        >>> polish('she saw a  owl . "come here," said a unicorn.')
        'She saw an owl. "Come here," said a unicorn.'
    """
    text = _LOOSE.sub(r"\1", _SPACES.sub(" ", text)).strip()
    text = _ARTICLE.sub(lambda m: f"{m[1]}{'n' if starts_with_vowel_sound(m[2]) else ''} ", text)
    return _SENTENCE_START.sub(lambda m: m[1] + m[2].upper(), text)


def starts_with_vowel_sound(word: str) -> bool:
    """Whether "an" goes before the word: "owl" and "hour", not "unicorn", "useful", "one" or "European"."""
    return _VOWEL_SOUND.match(word) is not None
