"""Tells a story: a plot, a scene and the grammar put together."""

from __future__ import annotations

import random
import re
from typing import Any

from tools.starter.general import tables
from tools.starter.general.grammar import Grammar, polish
from tools.starter.general.plot import Plot, fill_row, read_plots, scene

PLOTS: tuple[Plot, ...] = read_plots()
_RULES = tables.read("rules")
_GRAMMARS = {
    kind: Grammar({**_RULES["rules"], "intro": _RULES["intro"].get(kind, [""])})
    for kind in ("child", "narrator", "animal", "worker", "letter")
}
# English puts oneself last: "Tom and I".
_SELF_LAST = re.compile(r"\bI and ([A-Z]\w+|the \w+)")


def story(rng: random.Random) -> str:
    """One short story of 80 to 350 words.

    Example:
        >>> story(random.Random(3)) == story(random.Random(3))
        True
    """
    plot = rng.choice(PLOTS)
    kind, slots = scene(plot, rng)
    grammar = _GRAMMARS[kind]
    fill_row(plot, slots, grammar, rng)
    letter = kind == "letter"
    paragraphs: list[list[str]] = [[]]
    for beat in plot.beats:
        chance, template = beat if isinstance(beat, tuple) else (1.0, beat)
        if rng.random() > chance:
            continue
        if paragraphs[-1] and (letter or rng.random() < 0.3):
            paragraphs.append([])
        paragraphs[-1].append(grammar.expand(template, slots, rng))
        if not letter and beat is not plot.beats[-1] and rng.random() < 0.15:
            paragraphs[-1].append(grammar.expand("<aside>", slots, rng))
    text = polish("\n\n".join(" ".join(p).strip() for p in paragraphs))
    if kind == "narrator":
        return _SELF_LAST.sub(lambda m: f"{m[1]} and I", text)
    return text if letter else _with_pronouns(text, slots, rng)


def _with_pronouns(text: str, slots: dict[str, Any], rng: random.Random) -> str:
    """Replace the hero's name by a pronoun in the second of two sentences that begin with it and have no other name."""
    hero = slots["hero"]
    others = (slots["friend"].name, slots["elder"].name, slots["victim"].name)
    name = re.escape(hero.Name)
    after = re.compile(rf'((?:^|[.!?] |\n){name} [^."!?\nA-Z]+[.!] ){name} (?!and )')

    def again(found: re.Match[str]) -> str:
        clear = rng.random() < 0.7 and not any(other in found[1] for other in others)
        return found[1] + (hero.He if clear else hero.Name) + " "

    return after.sub(again, text)
