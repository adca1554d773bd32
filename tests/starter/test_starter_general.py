"""The generated English: every template resolves, and what comes out reads like written English."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import pytest

from trimtab.facts.errors import DataError
from trimtab.starter.general import tell
from trimtab.starter.general.grammar import Grammar, Node, parse, plural, polish
from trimtab.starter.general.plot import fill_row, scene
from trimtab.starter.stories import general_document, general_documents


def leaves(nodes: tuple[Node, ...]) -> Iterator[Node]:
    for kind, value in nodes:
        if kind == "choice":
            for option in value:
                yield from leaves(option)
        else:
            yield kind, value


@pytest.mark.parametrize("plot", tell.PLOTS, ids=lambda p: p.name)
def test_every_alternative_of_every_plot_resolves(plot: tell.Plot) -> None:
    """Chance would find a misspelt slot only once in thousands of stories."""
    rng = random.Random(0)
    for _ in range(12):
        kind, slots = scene(plot, rng)
        grammar = tell._GRAMMARS[kind]
        fill_row(plot, slots, grammar, rng)
        templates = [parse(b if isinstance(b, str) else b[1]) for b in plot.beats]
        templates += [nodes for options in grammar.rules.values() for nodes in options]
        for nodes in templates:
            for leaf, value in leaves(nodes):
                if leaf == "rule":
                    assert value in grammar.rules
                elif leaf == "slot" and value[0] in slots:
                    assert not value[1] or isinstance(getattr(slots[value[0]], value[1]), str)
                elif leaf == "slot":
                    raise AssertionError(f"no slot {value[0]} in plot {plot.name}")


FAULTS = {
    "left-over template": r"[{}\[\]<>|]",
    "double space": r"  ",
    "space before a mark": r" [,.;!?]",
    "small letter after a full stop": r"(?<!Mr)(?<!Mrs)[a-z]\. [a-z]",
    "small letter after an opening quote": r'(?:^|[\s])"[a-z]',
    "article": r"\b[Aa] [aeio]\w+|\b[Aa]n [bcdfgjklmnpqrstvwxyz]",
    "doubled word": r"\b(\w+) \1\b",
    "verb after I": r"\bI (?:is|has|does|goes|helps|likes)\b",
    "I as an object": r"\b(?:gave|told|saw|helped|hugged|beside|behind) I\b",
    "doubled mark": r"[.,!?][.,!?]",
}


def test_thousands_of_documents_have_no_visible_fault() -> None:
    faults: dict[str, str] = {}
    for text in general_documents(77, 4000):
        for name, pattern in FAULTS.items():
            found = re.search(pattern, text.replace("...", ""))
            if found is not None and not (name == "doubled word" and found[1] in ("that", "had")):
                faults.setdefault(name, text[max(0, found.start() - 40) : found.end() + 40])
    assert faults == {}


def test_documents_are_a_function_of_seed_split_and_index() -> None:
    assert list(general_documents(1, 6)) == [general_document(1, i) for i in range(6)]
    assert general_document(1, 0) != general_document(2, 0)
    assert general_document(1, 0) != general_document(1, 0, "heldout")


def test_stories_do_not_repeat() -> None:
    rng = random.Random(0)
    stories = [tell.story(rng) for _ in range(2000)]
    assert len(set(stories)) == 2000
    openings = {" ".join(s.split()[:12]) for s in stories}
    assert len(openings) > 1400


def test_general_text_holds_no_sums() -> None:
    """Mathematics must be new to the base model."""
    for text in general_documents(5, 3000):
        assert not re.search(r"\d [-+×*/=] |Question:|Answer:|derivative|integral", text)


def test_unknown_split_is_an_error() -> None:
    with pytest.raises(DataError, match="no split"):
        general_document(0, 0, "test")


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("she saw a owl and an bear .", "She saw an owl and a bear."),
        ("a hour, a unicorn, an useful thing, a onion", "An hour, a unicorn, a useful thing, an onion"),
        ('he said, "where is it?" and left. it was late.', 'He said, "Where is it?" and left. It was late.'),
        ('"is it here?" she asked.', '"Is it here?" she asked.'),
        ("one.\n\ntwo", "One.\n\nTwo"),
    ],
)
def test_polish(raw: str, clean: str) -> None:
    assert polish(raw) == clean


def test_plural() -> None:
    words = ["box", "berry", "leaf", "day", "glass", "child", "wooden chair", "sheep", "potato"]
    expected = [
        "boxes",
        "berries",
        "leaves",
        "days",
        "glasses",
        "children",
        "wooden chairs",
        "sheep",
        "potatoes",
    ]
    assert [plural(w) for w in words] == expected


def test_grammar_chooses_among_all_alternatives() -> None:
    grammar = Grammar({"end": ["x", "y"]})
    rng = random.Random(0)
    seen = {grammar.expand("[a|b[c|d]|]<end>{s}", {"s": "!"}, rng) for _ in range(200)}
    assert seen == {"ax!", "ay!", "bcx!", "bcy!", "bdx!", "bdy!", "x!", "y!"}


@pytest.mark.parametrize("template", ["[a|b", "a]", "{a", "<Rule>"])
def test_broken_templates_are_noticed(template: str) -> None:
    with pytest.raises(AssertionError):
        parse(template)
