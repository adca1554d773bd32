"""Reads the pages: fenced blocks with the marker before them, links, code spans.

A marker is an HTML comment on the line before a block, so readers of the page never see it:

    <!-- run -->                        the block is run, in the page's order, in the page's own folder
    <!-- run, train: max_steps=2 -->    the same, with words added to each `trimtab train …` line
    <!-- run, ends with 2 -->           its last command ends with this exit code
    <!-- run, afresh -->                first everything is put back as it was before the page's first block
    <!-- printed -->                    each line of the block was printed by the block run before; … is anything
    <!-- file: recipe.yaml -->          the block is written to this file before what follows is run
    <!-- skip: why -->                  not run here, for a reason that is given
    <!-- needs: GPU -->                 not run where that is missing
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "lab").glob("*.md")),
]
REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_MARKER = re.compile(r"<!-- (.*) -->\n\Z")

# The README carries no markers: it is also the page of the package index. First line of a block → its marker.
README_MARKERS = {
    "trimtab plan Qwen/Qwen3-8B --gpu 24GB": "run",
    "source .venv/bin/activate": "skip: changes the shell that it runs in",
    "make demo": "skip: sets up an environment of its own; continuous integration runs it on a fresh machine",
    "trimtab profile recipe.yaml": "skip: measures for minutes; each command has a page in docs/lab",
    "trimtab train own-text": "run",
    "trimtab train --resume runs/own-text": "run, generate: --max-new-tokens 8; eval: --no-probe --sequences 2",
    "import trimtab": "run, afresh",
}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str
    marker: str | None

    @property
    def place(self) -> str:
        """For messages: `docs/data.md:12`."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def is_program(self) -> bool:
        """Whether a reader would run it."""
        return self.language in ("sh", "bash", "shell", "console", "python")


@dataclass(frozen=True)
class Order:
    """What a `run` marker asks for."""

    added: dict[str, list[str]] = field(default_factory=dict)
    exit_code: int = 0
    afresh: bool = False


def blocks(page: Path) -> list[Block]:
    """Every fenced block of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        before = _MARKER.search(text[: match.start()])
        marker = before[1] if before else None
        if marker is None and page.name == "README.md" and page.parent == ROOT:
            firsts = [first for first in README_MARKERS if match[2].startswith(first)]
            marker = README_MARKERS[firsts[0]] if firsts else None
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(page, line, match[1], match[2], marker))
    return found


def order(marker: str) -> Order:
    """`run, train: a=1 b=2; generate: --seed 3` read into what is added to which verb."""
    head, _, rest = marker.partition(",")
    assert head == "run", marker
    added: dict[str, list[str]] = {}
    code, afresh = 0, False
    for part in filter(None, (piece.strip() for piece in rest.split(";"))):
        if part.startswith("ends with "):
            code = int(part.removeprefix("ends with "))
            continue
        if part == "afresh":
            afresh = True
            continue
        verb, colon, words = part.partition(": ")
        assert colon, f"not understood: {part!r}"
        added[verb] = words.split()
    return Order(added, code, afresh)


def prose(page: Path) -> str:
    """A page without its fenced blocks and comments."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    return re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)


def spans(page: Path) -> list[str]:
    """The `code spans` of a page, line breaks made spaces."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(page))]


def anchors(page: Path) -> set[str]:
    """The anchors that a page's headings get on the usual sites."""
    lines = _FENCE.sub("", page.read_text(encoding="utf-8")).splitlines()
    headings = [line.lstrip("#").strip().lower() for line in lines if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}
