"""How the starter's corpus is built: public-domain text, number facts, the files that ship."""

from __future__ import annotations

import gzip
import struct
import subprocess
import sys
import zlib
from collections import Counter
from pathlib import Path

import pytest

from tools.starter import corpora, texts
from tools.starter.numbers import SIGNS, number_documents
from tools.starter.stories import general_documents
from tools.starter.terms import term_documents
from trimtab import starter
from trimtab.facts.errors import DataError
from trimtab.facts.randomness import derive
from trimtab.starter.mathematics.problem import HELDOUT_ONE_IN


def test_generators_import_no_torch() -> None:
    code = (
        "import sys; import tools.starter.corpora; from tools.starter.stories import general_documents;"
        "next(general_documents(0, 1)); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_held_out_text_is_not_replayed_nor_generated_for_training() -> None:
    general = set(starter.general_text())
    assert not general & set(corpora.read_lines(starter.data_file("replay")))
    assert not general & set(general_documents(corpora.SEED, 5000))
    paragraphs = Counter(p for text in general for p in text.split("\n\n") if len(p) > 200)
    replayed = {p for text in corpora.read_lines(starter.data_file("replay")) for p in text.split("\n\n")}
    assert not set(paragraphs) & replayed


def test_replay_is_text_the_base_was_trained_on() -> None:
    trained = set(general_documents(corpora.SEED, 400))
    generated = [t for t in corpora.read_lines(starter.data_file("replay")) if t in trained]
    assert len(generated) > 100


def test_number_facts_hold_and_answer_no_heldout_problem() -> None:
    names = {sign: topic for topic, sign in SIGNS.items()}
    signs = {"+": int.__add__, "-": int.__sub__, "×": int.__mul__, "/": int.__floordiv__}
    seen = 0
    for line in "\n".join(number_documents(3, 300)).splitlines():
        parts = line.split()
        if len(parts) != 5 or parts[1] not in signs:
            continue
        a, b, result = int(parts[0]), int(parts[2]), int(parts[4])
        assert signs[parts[1]](a, b) == result, line
        key = (min(a, b), max(a, b)) if parts[1] == "+" else (a, b)
        basic = {
            "+": a < 10 and b < 10,
            "-": b < 10 and a - b < 10,
            "×": b <= 10,
            "/": False,
        }[parts[1]]
        is_heldout = derive(0, "starter-split", names[parts[1]], *key) % HELDOUT_ONE_IN == 0
        assert basic or not is_heldout, line
        seen += 1
    assert seen > 1000


def test_terms_are_repeated_unchanged() -> None:
    sums = [line for d in term_documents(3, 200) for line in d.splitlines() if "part is" in line]
    assert len(sums) > 200
    for line in sums:
        expression, told = line.rstrip(".").split(": ")
        assert [part.split(" is ")[1] for part in told.split(", ")] == expression.split(" + ")


def r_record(lines: list[str]) -> bytes:
    body = b"X\n" + struct.pack(">iii", 3, 0x040201, 0x030500) + struct.pack(">i", 5) + b"UTF-8"
    body += struct.pack(">ii", 16, len(lines))
    for line in lines:
        raw = line.encode()
        body += struct.pack(">ii", 0x00040009, len(raw)) + raw
    return struct.pack(">I", len(body)) + zlib.compress(body)


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    """Two tiny packages in the real formats."""
    novel = ["A NOVEL", "", "by Somebody", "", "CHAPTER 1", ""]
    for i in range(40):
        novel += [f"Paragraph {i} of the novel--with a _dash_--", "goes on in a second line.", ""]
        if i % 5 == 4:
            novel += [f"CHAPTER {i}", ""]
    other = ["OTHER", *novel[1:]]
    (tmp_path / texts.AUSTEN).parent.mkdir(parents=True)
    (tmp_path / texts.AUSTEN).write_bytes(
        r_record(novel) + r_record([s.replace("novel", "book") for s in other])
    )
    folder = tmp_path / texts.BIBLE
    folder.mkdir(parents=True)
    for part in ("ot", "nt"):
        markup = "".join(
            f'<chapter n="{n}" osisID="Book{part}.{n}" sID="x"/><title>Not this</title><div sID="g" type="x-p"/>'
            f'<w lemma="a">In</w> {part} chapter {n} they went<note>1:1 not this</note> to “the town” by the sea.'
            for n in range(1, 41)
        )
        block = zlib.compress(markup.encode())
        (folder / f"{part}.bzz").write_bytes(block)
        (folder / f"{part}.bzs").write_bytes(struct.pack("<III", 0, len(block), len(markup)))
    return tmp_path


def test_text_is_extracted_from_the_packages(packages: Path) -> None:
    found = texts.chapters(packages)
    works = Counter(c.work for c in found)
    assert works == {"A Novel": 8, "Other": 8, "Bible Bookot": 40, "Bible Booknt": 40}
    assert found[0].paragraphs[0] == "Paragraph 0 of the novel—with a dash—goes on in a second line.".replace(
        "—goes", "— goes"
    )
    bible = next(c for c in found if c.work == "Bible Bookot")
    assert bible.paragraphs == ['In ot chapter 1 they went to "the town" by the sea.']
    assert {c.split for c in found} == {"train", "heldout"}


def test_a_passage_that_is_trained_on_is_not_held_out(
    packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = texts.chapters(packages)
    shared = next(c for c in found if c.split == "heldout").paragraphs[0]
    trained = next(i for i, c in enumerate(found) if c.split == "train")
    found[trained] = found[trained]._replace(paragraphs=[*found[trained].paragraphs, shared])
    monkeypatch.setattr(texts, "chapters", lambda folder: found)
    assert any(shared in d for d in corpora.public_documents(packages, "train"))
    assert not any(shared in d for d in corpora.public_documents(packages, "heldout"))


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="apt-get download r-cran-janeaustenr"):
        texts.chapters(tmp_path)


def test_long_chapters_are_cut_between_paragraphs_and_sentences() -> None:
    long = " ".join(f"Sentence number {i} ends here." for i in range(200))
    chapter = texts.Chapter("x", 0, ["A first paragraph.", long])
    pieces = list(texts.documents(chapter, 500))
    assert max(map(len, pieces)) <= 510
    assert len(pieces) > 10
    assert "".join(pieces).replace("\n\n", "").replace(" ", "") == ("A first paragraph." + long).replace(
        " ", ""
    )


def test_corpora_command(packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpora, "SHARD_DOCUMENTS", 30)
    corpora.main([str(tmp_path / "a"), "--texts", str(packages), "--shards", "2", "--workers", "1"])
    assert len(list(corpora.read_lines(tmp_path / "a" / "stories-01.jsonl"))) == 30
    public = list(corpora.read_lines(tmp_path / "a" / "public.jsonl"))
    heldout = corpora.public_documents(packages, "heldout")
    assert public
    assert heldout
    assert not set(public) & set(heldout)
    packed = tmp_path / "public.jsonl.gz"
    packed.write_bytes(gzip.compress((tmp_path / "a" / "public.jsonl").read_bytes()))
    corpora.main([str(tmp_path / "b"), "--public", str(packed), "--shards", "1", "--workers", "1"])
    for name in ("public.jsonl", "stories-00.jsonl"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_numbers_and_terms_do_not_depend_on_the_processes(tmp_path: Path) -> None:
    for name in ("numbers", "terms"):
        one, two = tmp_path / "one", tmp_path / "two"
        for folder, workers in ((one, 1), (two, 2)):
            folder.mkdir(exist_ok=True)
            assert corpora.write_lessons(folder, name, 5_010, workers) > 0
        assert (one / f"{name}.jsonl").read_bytes() == (two / f"{name}.jsonl").read_bytes()
        found = list(corpora.read_lines(one / f"{name}.jsonl"))
        assert len(found) == 5_010
        assert found[5_000:] == list(corpora.LESSONS[name](corpora.SEED, 10, 5_000))


def test_corpora_command_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        corpora.main([str(tmp_path), "--texts", str(tmp_path)])
    assert "apt-get download" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        corpora.main([str(tmp_path)])
