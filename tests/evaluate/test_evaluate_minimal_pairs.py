"""The probe's items: fair pairs, right sums, and the file that the generator writes."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tools.starter.probe import make_items, write_items
from trimtab import starter
from trimtab.evaluate import minimal_pairs, probe_items


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(starter.base_folder() / "tokenizer.json"))


def test_the_file_is_what_the_generator_writes(tmp_path: Path) -> None:
    write_items(tmp_path / "items.jsonl")
    assert (tmp_path / "items.jsonl").read_bytes() == minimal_pairs.FILE.read_bytes()
    assert probe_items() == make_items()


def test_items_are_read_without_torch() -> None:
    code = "import sys; from trimtab.evaluate import probe_items; probe_items(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_probe_is_fair(tokenizer: Tokenizer) -> None:
    items = probe_items()
    assert len(items) >= 120
    assert len(set(items)) == len(items)
    counts = Counter(item.kind for item in items)
    assert len(counts) >= 10
    assert min(counts.values()) >= 12
    for item in items:
        right, wrong = (item.context + ending for ending in item.alternatives)
        assert right != wrong
        assert len(right.split()) == len(wrong.split()), item
        # The first token is given to a model without a beginning token: the sides must begin alike.
        assert tokenizer.encode(right).ids[0] == tokenizer.encode(wrong).ids[0], item


def test_probe_sums_are_right() -> None:
    for item in probe_items():
        if item.kind == "arithmetic":
            left = item.context.removesuffix(" =").replace("×", "*")
            values = [int(a.strip(" .")) for a in item.alternatives]
            assert eval(left) == values[0] != values[1]
            assert len(str(values[0])) == len(str(values[1]))
