"""Every command and every Python block of the pages is run, or says why it is not."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from tests.docs import stage
from tests.docs.pages import PAGES, ROOT, Block, blocks, order

MARKERS = re.compile(r"run(, .+)?|printed|file: [\w.-]+|skip: .{10,}|needs: .+")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stage")
    stage.build(folder)
    return folder


def to_run(page: Path) -> list[Block]:
    return [block for block in blocks(page) if re.match("run|printed|file", block.marker or "")]


@pytest.mark.parametrize("page", [page for page in PAGES if to_run(page)], ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run(
    page: Path, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "page"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(sys, "argv", ["trimtab"])
    # A reader's process has compiled nothing yet; this one may have, for another test.
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    threads = torch.get_num_threads()
    made_by_the_page = "my-model" if page == ROOT / "README.md" else None
    played = stage.Stage(folder, built, without=made_by_the_page)
    try:
        for block in to_run(page):
            played.play(block)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_is_run_or_has_a_reason(page: Path) -> None:
    for block in blocks(page):
        if block.is_program:
            assert block.marker, f"{block.place}: no marker before the block; tests/docs/pages.py lists them"
        if block.marker:
            assert MARKERS.fullmatch(block.marker), f"{block.place}: unknown marker {block.marker!r}"
        for by, test in re.findall(r"(run by )?(tests/[\w/]+\.py)", block.marker or ""):
            text = (ROOT / test).read_text(encoding="utf-8")
            assert not by or page.name in text, f"{test} does not speak of {page.name}"


def test_a_command_that_fails_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    played = stage.Stage(tmp_path)
    page = ROOT / "docs" / "README.md"
    for line in ("trimtab train missing.yaml", "false", "false | cat"):
        with pytest.raises(AssertionError, match="ended with"):
            played.play(Block(page, 1, "sh", f"{line}\n", "run"))
    played.play(Block(page, 1, "sh", "trimtab train missing.yaml\n", "run, ends with 2"))
    played.play(Block(page, 1, "text", "error: …missing.yaml…\n", "printed"))
    with pytest.raises(AssertionError, match="not printed"):
        played.play(Block(page, 1, "text", "error: …found…\n", "printed"))


def test_orders_are_understood() -> None:
    wish = order("run, train: a=1 b=2; generate: --seed 3; ends with 6")
    assert wish.added == {"train": ["a=1", "b=2"], "generate": ["--seed", "3"]}
    assert wish.exit_code == 6
    with pytest.raises(AssertionError, match="not understood"):
        order("run, quickly")
