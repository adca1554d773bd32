from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools import wording
from tools.wording import IDIOMS, ROOT, find, find_all, tracked


@pytest.mark.parametrize(
    ("line", "better"),
    [
        ("what a person sees", "user"),
        ("layers that are computed again", "recompute"),
        ("8 bytes a parameter", "per token"),
        ("a run goes on from its checkpoint", "resume"),
        ("the gradients held by a layer", "allocated"),
        ("the number format of a tensor", "dtype"),
        ("packed windows of 1024 tokens", "sequence"),
        ("a query that is blind to all keys", "fully masked"),
        ("rows of nothing", "empty"),
        ("the option is ignored in silence", "silently"),
        ("other files are left alone", "unchanged"),
        ("compilation rules out a second graph", "not possible"),
        ("the two keys exclude each other", "does not support"),
        ("any order will do", "is enough"),
        ("with more than none of them", "at least one"),
        ("a policy that is in force", "in effect"),
        ("def go_on(run):", "resume"),
    ],
)
def test_an_idiom_is_found_with_its_line_and_the_better_term(line: str, better: str) -> None:
    (found,) = find(Path("a.md"), f"fine\n{line}\n")
    assert found.line == 2
    assert better in found.describe()


@pytest.mark.parametrize(
    "line",
    [
        "loss on held-out text",
        "a sliding window of 4096 tokens",
        "there is room for two more",
        "8 bytes per parameter",
        "the seed alone decides",
        "the rule of the outer dimension",
        "for somebody  # wording: allow",
    ],
)
def test_plain_english_is_accepted(line: str) -> None:
    assert list(find(Path("a.py"), line)) == []


def test_no_tracked_file_has_an_idiom() -> None:
    files = tracked(ROOT)
    assert [finding.describe() for finding in find_all(ROOT, files)] == []
    assert len(files) > 1000


def test_names_of_idioms_are_unique() -> None:
    assert len({one.name for one in IDIOMS}) == len(IDIOMS)


def test_the_command_fails_on_a_file_with_an_idiom(tmp_path: Path) -> None:
    file = tmp_path / "page.md"
    command = [sys.executable, "-m", "tools.wording", str(file)]
    file.write_text("the user resumes the run\n")
    assert subprocess.run(command, cwd=ROOT).returncode == 0
    file.write_text("the run goes on\n")
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "page.md:1: 'goes on': write continue, resume" in ended.stdout
    assert wording.ALLOWED in ended.stderr
