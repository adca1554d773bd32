"""Pictures of the documentation: every link leads to a file, every file is linked, every study has one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trimtab.lab.studies import TITLES

DOCS = Path(__file__).parents[2] / "docs"
PICTURE = re.compile(r"!\[([^\]]+)\]\(([^)\s]+)\)")


def linked(page: Path) -> list[Path]:
    """The pictures of a page."""
    return [(page.parent / target).resolve() for _, target in PICTURE.findall(page.read_text())]


def test_pictures_exist_and_are_used() -> None:
    pages = sorted(DOCS.rglob("*.md"))
    found = {picture for page in pages for picture in linked(page) if not picture.name.startswith("http")}
    missing = [str(picture) for picture in found if not picture.is_file()]
    assert not missing
    unused = set(DOCS.rglob("*.png")) - found
    assert not unused


@pytest.mark.parametrize("name", [*TITLES, "profile", "numerics"])
def test_every_study_shows_a_picture_of_its_report(name: str) -> None:
    page = DOCS / "lab" / f"{name}.md"
    pictures = [picture for picture in linked(page) if picture.suffix == ".png"]
    assert pictures
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)
    assert all(picture.stat().st_size < 100_000 for picture in pictures)
