"""What ships: sizes, the tokenizer, recipes that load, the probe, and the way the corpus is built."""

from __future__ import annotations

import gzip
import json
import re
import struct
import subprocess
import sys
import zlib
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from trimtab import starter
from trimtab.facts.errors import DataError
from trimtab.recipe import load
from trimtab.starter import corpora, texts


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(starter.base_folder() / "tokenizer.json"))


def test_the_base_model_is_small() -> None:
    files = [f for f in starter.base_folder().iterdir() if f.is_file()]
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= {f.name for f in files}
    assert sum(f.stat().st_size for f in files) < 10_000_000


def test_config_and_tokenizer_agree(tokenizer: Tokenizer) -> None:
    config = json.loads((starter.base_folder() / "config.json").read_text())
    assert config["vocab_size"] == tokenizer.get_vocab_size() == 4096
    assert config["eos_token_id"] == tokenizer.token_to_id("<|endoftext|>") == 0


@pytest.mark.parametrize(
    "text", ["Solve 3x + 5 = 20.\nAnswer: x = 5\n\n", "naïve — “quotes” 北京 🙂\t\r\n  end ", "2026"]
)
def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_each_digit_is_a_token(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("1234 + 56").tokens == ["1", "2", "3", "4", "Ġ+", "Ġ", "5", "6"]
    digits = [t for t in tokenizer.get_vocab() if re.search(r"\d", t)]
    assert sorted(digits) == list("0123456789")


def test_common_words_are_single_tokens(tokenizer: Tokenizer) -> None:
    for word in ("the", "derivative", "integral", "Question", "Answer", "friend", "garden", "because"):
        assert len(tokenizer.encode(f" {word}").ids) <= 2


@pytest.mark.parametrize("name", ["general", "replay"])
def test_shipped_text_is_small_and_readable(name: str) -> None:
    path = starter.data_file(name)
    assert path.stat().st_size <= 350_000
    found = list(corpora.read_lines(path))
    assert all(found)
    assert len(set(found)) == len(found)


def test_held_out_text_is_not_replayed_nor_generated_for_training() -> None:
    general = set(starter.general_text())
    assert not general & set(corpora.read_lines(starter.data_file("replay")))
    assert not general & set(starter.general_documents(corpora.SEED, 5000))
    paragraphs = Counter(p for text in general for p in text.split("\n\n") if len(p) > 200)
    replayed = {p for text in corpora.read_lines(starter.data_file("replay")) for p in text.split("\n\n")}
    assert not set(paragraphs) & replayed


def test_replay_is_text_the_base_was_trained_on() -> None:
    trained = set(starter.general_documents(corpora.SEED, 400))
    generated = [t for t in corpora.read_lines(starter.data_file("replay")) if t in trained]
    assert len(generated) > 100


@pytest.mark.parametrize("name", ["demo", "pretrain"])
def test_recipes_load(name: str) -> None:
    recipe = load(starter.recipe_file(name))
    assert recipe.max_seq_length <= 512


def test_unknown_names_are_errors() -> None:
    with pytest.raises(DataError, match="general, replay"):
        starter.data_file("other")
    with pytest.raises(DataError, match="demo, pretrain"):
        starter.recipe_file("other")
    with pytest.raises(AttributeError):
        _ = starter.nothing  # type: ignore[attr-defined]


def test_generators_import_no_torch() -> None:
    code = (
        "import sys; from trimtab import starter; next(starter.math_documents(0, 1)); starter.probe_items();"
        "next(starter.general_documents(0, 1)); import trimtab.starter.corpora; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_probe_is_fair(tokenizer: Tokenizer) -> None:
    items = starter.probe_items()
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
    for item in starter.probe_items():
        if item.kind == "arithmetic":
            left = item.context.removesuffix(" =").replace("×", "*")
            values = [int(a.strip(" .")) for a in item.alternatives]
            assert eval(left) == values[0] != values[1]
            assert len(str(values[0])) == len(str(values[1]))


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
