"""Public-domain text out of Debian packages: Jane Austen's novels and the World English Bible.

The packages are unpacked (`dpkg-deb -x FILE.deb FOLDER`), not installed; neither R nor a Bible program is
needed. The novels are in R's lazy-load database: length-prefixed zlib records of serialized character vectors.
The Bible is a SWORD zText module: an index of zlib blocks, one per book, in OSIS markup.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from trimtab.facts.errors import DataError
from trimtab.facts.randomness import derive

AUSTEN = "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
BIBLE = "usr/share/sword/modules/texts/ztext/engWEB2015eb"
PACKAGES = {AUSTEN: "r-cran-janeaustenr", BIBLE: "sword-text-web"}

_CHAPTER = re.compile(r"(?i)^\s*(chapter|volume)\b")
_ASCII = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "\u00a0": " ", "\u202f": " ", "\u200a": " "})


class Chapter(NamedTuple):
    """Consecutive paragraphs of one work."""

    work: str
    number: int
    paragraphs: list[str]

    @property
    def split(self) -> str:
        """One chapter in twenty is held out, by a hash of its position."""
        return "heldout" if derive(0, "starter-text", self.work, self.number) % 20 == 0 else "train"


def chapters(folder: Path) -> list[Chapter]:
    """All chapters of all works found in a folder of unpacked packages (or a system root).

    Raises DataError naming the package when a work is not there.
    """
    for place, package in PACKAGES.items():
        if not (folder / place).exists():
            raise DataError(
                f"{folder} has no {place}",
                f"`apt-get download {package}`, then `dpkg-deb -x {package}_*.deb {folder}`",
            )
    return [*austen(folder / AUSTEN), *bible(folder / BIBLE)]


def documents(chapter: Chapter, max_chars: int = 1600) -> Iterator[str]:
    """Split a chapter between paragraphs into documents of about `max_chars`, which fit into a sequence."""
    collected: list[str] = []
    size = 0
    for paragraph in (piece for p in chapter.paragraphs for piece in _pieces(p, max_chars)):
        if collected and size + len(paragraph) > max_chars:
            yield "\n\n".join(collected)
            collected, size = [], 0
        collected.append(paragraph)
        size += len(paragraph)
    if collected:
        yield "\n\n".join(collected)


def _pieces(paragraph: str, max_chars: int) -> Iterator[str]:
    """Split a very long paragraph after sentences."""
    collected = ""
    for sentence in re.split(r"(?<=[.!?;\"]) (?=[A-Z\"])", paragraph):
        if collected and len(collected) + len(sentence) > max_chars:
            yield collected
            collected = ""
        collected = f"{collected} {sentence}".lstrip()
    yield collected


def austen(path: Path) -> Iterator[Chapter]:
    """Yield the chapters of the six novels from the R database."""
    data = path.read_bytes()
    at = 0
    while at < len(data):
        inflate = zlib.decompressobj()
        lines = r_strings(inflate.decompress(data[at + 4 :]))
        at = len(data) - len(inflate.unused_data)
        yield from _novel(lines)


def _novel(lines: list[str]) -> Iterator[Chapter]:
    work, number = lines[0].strip().title(), 0
    paragraphs: list[str] = []
    collected: list[str] = []
    for line in [*lines[1:], "", "CHAPTER"]:
        if line.strip() and not _CHAPTER.match(line):
            collected.append(line.strip())
            continue
        text = clean(" ".join(collected))
        # Title pages, dates and "THE END" are not prose.
        if len(text) > 25 and not text.isupper():
            paragraphs.append(text)
        collected = []
        if _CHAPTER.match(line):
            if len(paragraphs) > 3:
                yield Chapter(work, number, paragraphs)
                number += 1
            paragraphs = []


def r_strings(record: bytes) -> list[str]:
    """The strings of one serialized R character vector (XDR, version 3)."""
    if record[:2] != b"X\n" or struct.unpack_from(">i", record, 2)[0] != 3:
        raise DataError("this is not a serialized R object of version 3", "use the package of Debian 12")
    at = 14 + 4 + struct.unpack_from(">i", record, 14)[0]
    kind, count = struct.unpack_from(">ii", record, at)
    if kind & 0xFF != 16:
        raise DataError("the R object is not a character vector", "use the package of Debian 12")
    at += 8
    strings = []
    for _ in range(count):
        length = struct.unpack_from(">i", record, at + 4)[0]
        at += 8
        strings.append(record[at : at + max(length, 0)].decode("utf-8"))
        at += max(length, 0)
    return strings


_DROP = re.compile(r"<note\b.*?</note>|<title\b.*?</title>", re.S)
_BREAK = re.compile(r'<div [^>]*type="x-p"[^>]*/>|<chapter [^>]*/>|</?lg[^>]*>')
_LINE = re.compile(r"<l\b[^>]*eID[^>]*/>|</l>")
_TAG = re.compile(r"<[^>]+>")


def bible(folder: Path) -> Iterator[Chapter]:
    """The books of the World English Bible, by chapter, without the preface."""
    for part in ("ot", "nt"):
        index, blocks = (folder / f"{part}.bzs").read_bytes(), (folder / f"{part}.bzz").read_bytes()
        for offset, size, _ in struct.iter_unpack("<III", index):
            markup = zlib.decompress(blocks[offset : offset + size]).decode("utf-8")
            # One block may contain several books; a chapter's tag names the book it belongs to.
            for piece in re.split(r"(?=<chapter [^>]*sID=)", markup)[1:]:
                name = re.match(r'<chapter n="(\d+)" osisID="(\w+)\.', piece)
                if name is None:
                    continue
                text = _BREAK.sub("\n\n", _LINE.sub("\n", _DROP.sub("", piece)))
                found = (clean(_TAG.sub("", p)) for p in text.split("\n\n"))
                paragraphs = [p for p in found if len(p) > 25]
                if paragraphs:
                    yield Chapter(f"Bible {name[2]}", int(name[1]), paragraphs)


def clean(text: str) -> str:
    """Plain quotes, one kind of dash, no emphasis marks, single spaces.

    Example:
        >>> clean("“I _am_ glad--very  glad,” said she .")
        '"I am glad—very glad," said she.'
    """
    text = text.translate(_ASCII).replace("--", "—").replace("_", "")
    text = re.sub(r"\[[^\]]{0,40}\]", "", text)
    return re.sub(r" +([,.;:!?])", r"\1", " ".join(text.split()))
