"""Items of the likelihood probe: minimal pairs for grammar and reasoning, the right alternative first.

Each item has a context (which may be empty) and two endings; the first is right. Both endings have the same number of
words and differ in one place after the first word, so that their likelihoods can be compared without normalization.
Chance level is one half. The words are common, so that the items suit any English model.

The items are in `minimal_pairs.jsonl`, one per line; `python -m tools.starter.probe` in the repository writes it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_suffix(".jsonl")


@dataclass(frozen=True)
class ProbeItem:
    """A choice between alternatives that continue a context; the first one is right.

    Example:
        >>> ProbeItem("arithmetic", "2 + 3 =", (" 5.", " 6.")).alternatives[0]
        ' 5.'
    """

    kind: str
    context: str
    alternatives: tuple[str, ...]


def probe_items() -> list[ProbeItem]:
    """All items of the probe, in the order of their kinds.

    Example:
        >>> len(probe_items())
        220
    """
    with FILE.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    return [ProbeItem(row["kind"], row["context"], tuple(row["alternatives"])) for row in rows]
