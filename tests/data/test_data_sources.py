"""From files to documents, and the errors for files that cannot be read."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from trimtab.data import readers, sources
from trimtab.data.caching import open_cached
from trimtab.data.readers import SegmentReader, split_segments
from trimtab.data.sources import SourceSpec, resolve, write_texts
from trimtab.data.spec import SEGMENT_CHARS
from trimtab.data.tokenizing import TokenizerSpec
from trimtab.facts.errors import DataError


def documents(source: str | Path, **settings: object) -> list[str]:
    texts: list[str] = []
    for segment in SegmentReader(resolve(SourceSpec(str(source), **settings))):  # type: ignore[arg-type]
        texts.append(segment.text) if segment.first else texts.append(texts.pop() + segment.text)
    return texts


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_a_folder_is_read_in_the_order_of_names_without_files_that_are_not_text(tmp_path: Path) -> None:
    for name in ("b/two.md", "a.txt", "c.pdf", ".hidden.txt", ".git/config.txt", "b/one.txt"):
        write(tmp_path / name, name)
    found = resolve(SourceSpec(str(tmp_path)))
    assert [file.name for file in found.files] == ["a.txt", "b/one.txt", "b/two.md"]
    assert found.ignored == ("c.pdf",)
    assert documents(tmp_path / "**" / "*.txt") == ["a.txt", "b/one.txt"]


def test_a_readme_next_to_tables_is_not_data(tmp_path: Path) -> None:
    write(tmp_path / "README.md", "about")
    write(tmp_path / "data" / "a.jsonl", '{"text": "x"}')
    assert documents(tmp_path) == ["x"]


def test_files_from_a_hub_keep_their_order_and_names(tmp_path: Path) -> None:
    files = tuple(write(tmp_path / name, name) for name in ("z/b.txt", "z/a.txt"))
    found = resolve(SourceSpec("someone/data", files=files))
    assert [file.name for file in found.files] == ["b.txt", "a.txt"]
    assert found.spec.name == "someone/data"


def test_every_format_gives_the_same_documents(tmp_path: Path) -> None:
    texts = ['first, with "quotes"', "zweite ü\nline two", "", "dritte 🙂"]
    rows = [{"n": i, "text": text, "title": "t"} for i, text in enumerate(texts)]
    lines = "\n".join(json.dumps(row) for row in rows) + "\n"
    write(tmp_path / "a.jsonl", lines)
    write(tmp_path / "b.json", json.dumps(rows, indent=1))
    write(tmp_path / "c.json", lines)
    write(tmp_path / "d.jsonl.gz", gzip.compress(lines.encode()))
    table = pa.table({"n": [0, 1, 2, 3], "text": texts, "title": ["t"] * 4})
    parquet.write_table(table, tmp_path / "e.parquet", row_group_size=2)
    cells = ['"first, with ""quotes"""', '"zweite ü\nline two"', '""', "dritte 🙂"]
    write(tmp_path / "f.csv", "\ufeffn,text,title\n" + "".join(f"0,{cell},t\n" for cell in cells))
    write(tmp_path / "g.jsonl.zst", pa.compress(lines.encode(), "zstd", asbytes=True))
    write(tmp_path / "h.json", json.dumps(texts))
    for file in sorted(tmp_path.iterdir()):
        assert documents(file) == texts, file.name
        assert documents(file, first=2) == texts[:2]
        late = list(SegmentReader(resolve(SourceSpec(str(file))), row=4))
        assert [(s.row, s.text) for s in late] == [(4, texts[3])], file.name


def test_text_files_become_documents_in_three_ways(tmp_path: Path) -> None:
    file = write(tmp_path / "a.txt", "one\r\ntwo\r\n\r\n \r\nthree\r\n")
    assert documents(file) == ["one\ntwo\n\n \nthree\n"]
    assert documents(file, documents="lines") == ["one", "two", "", " ", "three"]
    assert documents(file, documents="blank-lines") == ["one\ntwo", "three"]
    rows = [s.row for s in SegmentReader(resolve(SourceSpec(str(file), documents="lines")), row=3)]
    assert rows == [3, 4, 5]


@given(st.lists(st.text(max_size=30), min_size=1, max_size=5), st.integers(1, 7))
@settings(max_examples=50, deadline=None)
def test_json_arrays_survive_any_block_size(tmp_path_factory, texts: list[str], block: int) -> None:
    from trimtab.data import readers_text

    file = write(tmp_path_factory.mktemp("json") / "a.json", json.dumps([{"text": t} for t in texts]))
    before, readers_text.BLOCK = readers_text.BLOCK, block
    try:
        found = documents(file)
    finally:
        readers_text.BLOCK = before
    assert found == [t.encode("utf-8", "replace").decode() if not t.isascii() else t for t in texts]


def test_columns_are_found_or_listed(tmp_path: Path) -> None:
    assert documents(write(tmp_path / "a.jsonl", '{"title": "t", "Content": "c"}')) == ["c"]
    assert documents(write(tmp_path / "b.jsonl", '{"n": 1, "poem": "p"}')) == ["p"]
    file = write(tmp_path / "c.jsonl", '{"question": "q", "answer": "a", "n": 3}')
    assert documents(file, text_column="answer") == ["a"]
    with pytest.raises(DataError, match=r"columns: question, answer, n \(not text\); set text_column"):
        documents(file)
    with pytest.raises(DataError, match=r"c\.jsonl:1 has no column 'txt' \(it has question, answer, n\)"):
        documents(file, text_column="txt")
    with pytest.raises(DataError, match=r"column 'n' of .*c\.jsonl:1 contains a number, not text"):
        documents(file, text_column="n")
    table = pa.table({"messages": [["a"]], "x": [1], "y": ["s"]})
    parquet.write_table(table, tmp_path / "d.parquet")
    with pytest.raises(
        DataError, match=r"'messages' of .* contains list<.*>, not text; set text_column to one of y"
    ):
        documents(tmp_path / "d.parquet", text_column="messages")
    with pytest.raises(DataError, match=r"'text' of .* does not exist; set text_column to one of y"):
        documents(tmp_path / "d.parquet", text_column="text")
    with pytest.raises(DataError, match=r"no column 'z'; set text_column to one of a, b"):
        documents(write(tmp_path / "e.csv", "a,b\n1,2\n"), text_column="z")


BAD_FILES = {
    "missing": (None, None, "does not exist; give a file, a folder or a glob"),
    "empty": ("a.txt", b"", r"a\.txt is empty; give a file with text"),
    "binary": ("a.txt", b"MZ\x00\x01\x02", "is a binary file, not text"),
    "utf16": ("a.txt", "text".encode("utf-16"), "is UTF-16; convert it: iconv"),
    "latin1": ("a.txt", b"abc d\xe9f", r"a\.txt is not UTF-8 at byte 5; convert it"),
    "cut utf8": ("a.txt", "abcü".encode()[:-1], r"is not UTF-8 at byte 3"),
    "far latin1": ("a.txt", b"x" * 300_000 + b"\xff!", "is not UTF-8 at byte 300000"),
    "jsonl latin1": ("a.jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n', r"not UTF-8 at byte 24"),
    "bad line": (
        "a.jsonl",
        b'{"text": "a"}\n{"text": \n',
        r"a\.jsonl:2 is not JSON .*write one JSON object per line",
    ),
    "bad later column": ("a.jsonl", b'{"text": "a"}\n{"txt": "b"}\n', r"a\.jsonl:2 has no column 'text'"),
    "list rows": ("a.jsonl", b"[1, 2]\n", "contains a list, not objects"),
    "bad array": ("a.json", b'[{"text": "a"}, {"text": }]', "is not JSON at element 2"),
    "open array": ("a.json", b'[{"text": "a"},', "ends inside its JSON array"),
    "gzip": ("a.jsonl.gz", gzip.compress(b'{"text": "abc"}\n' * 99)[:-9], "cannot be read"),
    "not gzip": ("a.txt.gz", b"plain", r"cannot be read \(Not a gzipped file"),
    "parquet": ("a.parquet", b"PAR1 and nothing else", "is not a complete Parquet file"),
    "csv row": ("a.csv", b"n,text\n1,a\n2\n", "row 2 of .* has 1 fields, not 2"),
    "csv row too long": (
        "a.csv",
        b'n,text\n1,"a\nb"\n2,2, 3, 5 and 7\n',
        r"row 2 of .*a\.csv \(line 4\) has 4 fields, not 2; put texts that contain commas in double quotes",
    ),
    "one column too long": (
        "a.csv",
        b"text\nHello, world\n",
        r"row 1 of .* \(line 2\) has 2 fields, not 1; put",
    ),
    "tsv row too long": (
        "a.tsv",
        b"n\ttext\n1\ta, b\n2\ta\tb\n",
        r"row 2 of .*a\.tsv \(line 3\) has 3 fields, not 2; put texts that contain tabs in double quotes",
    ),
    "blank only": ("a.txt", b" \n\t\n", r"contains no documents: 1 empty were skipped"),
    "empty rows": ("a.jsonl", b'{"text": ""}\n{"text": null}\n', "contains no documents: 2 empty"),
    "a quote without an end": (
        "a.csv",
        b'n,text\n1,fine\n2,"He said hi\n3,second\n',
        r"is not CSV at line 3 \(unexpected end of data\); .*double the inner quotes",
    ),
    "quotes inside": (
        "a.tsv",
        b'text\tn\n"Quoted" start\t1\n',
        r"is not CSV at line 2 .*double the inner quotes",
    ),
    "twins": ("a.csv", b"text,text\na,b\n", "has several columns named 'text'; give each a diff"),
    "two arrays": ("a.json", b'[{"text": "a b"}]\n[{"text": "c d"}]', "has content after its JSON array"),
    "digits": ("a.jsonl", b'{"text": "a", "n": ' + b"1" * 5000 + b"}", r"a\.jsonl:1 is not JSON"),
    "digits in an array": ("a.json", b'[{"text": "a", "n": ' + b"1" * 5000 + b"}]", "at element 1"),
    "no rows": ("a.csv", b"text\n", "contains no documents; use a source that contains text"),
    "no rows, and no text column": (
        "a.csv",
        b"prompt,completion\n",
        "contains no documents; use a source that contains text",
    ),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_files_are_refused_with_the_location(case: str, tmp_path: Path, tokenizer) -> None:
    name, content, message = BAD_FILES[case]
    path = tmp_path / (name or "nowhere.txt")
    if content is not None:
        write(path, content)
    with pytest.raises(DataError, match=message) as caught:
        open_cached(SourceSpec(str(path)), tokenizer, cache_dir=tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache" / "entries").glob("*")) if (tmp_path / "cache").exists() else True


@pytest.mark.parametrize("between", [",", "\t"])
def test_empty_fields_at_the_end_of_a_row_are_harmless(tmp_path: Path, between: str) -> None:
    rows = [["n", "text"], ["1", "a"], ["2", "b", ""], ["3", "c", " ", "", ""], ["4", "d"]]
    name = "a.tsv" if between == "\t" else "a.csv"
    file = write(tmp_path / name, "".join(between.join(row) + "\n" for row in rows))
    assert documents(file) == ["a", "b", "c", "d"]


def test_truncated_parquet_is_refused(tmp_path: Path) -> None:
    table = pa.table({"text": [f"row {i} " * 50 for i in range(5000)]})
    parquet.write_table(table, tmp_path / "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    write(tmp_path / "cut.parquet", whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"is not a complete Parquet file"):
        documents(tmp_path / "cut.parquet")
    middle = len(whole) // 3
    write(tmp_path / "holed.parquet", whole[:middle] + b"\xff" * 4000 + whole[middle + 4000 :])
    with pytest.raises(DataError, match=r"is not a complete Parquet file|is not UTF-8"):
        documents(tmp_path / "holed.parquet")


def test_broken_links_and_devices_are_reported(tmp_path: Path) -> None:
    link, pipe = tmp_path / "texts" / "link.txt", tmp_path / "pipe"
    link.parent.mkdir()
    link.symlink_to("absent.txt")
    os.mkfifo(pipe)
    with pytest.raises(DataError, match=r"link\.txt is a broken link \(to absent\.txt\); point the link to"):
        resolve(SourceSpec(str(link)))
    with pytest.raises(
        DataError, match=r"texts contains no text files \(link\.txt is a broken link\); point"
    ):
        resolve(SourceSpec(str(link.parent)))
    for path in (pipe, Path(os.devnull)):
        with pytest.raises(
            DataError, match=rf"{path} is not a regular file: .*; write its content to a file"
        ):
            resolve(SourceSpec(str(path)))


def test_folders_and_globs_without_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"contains no text files \(it is empty\)"):
        resolve(SourceSpec(str(tmp_path)))
    write(tmp_path / "a.pdf", b"x")
    with pytest.raises(DataError, match=r"contains no text files \(only a\.pdf\)"):
        resolve(SourceSpec(str(tmp_path)))
    with pytest.raises(DataError, match=r"no file matches .*\.txt; check the pattern"):
        resolve(SourceSpec(str(tmp_path / "*.txt")))


@pytest.mark.parametrize(
    "bad", [{"documents": "pages"}, {"first": 0}, {"weight": 0.0}, {"weight": float("nan")}]
)
def test_impossible_settings_are_refused(bad: dict) -> None:
    with pytest.raises(DataError):
        SourceSpec("x", **bad)


def test_skipped_documents_are_counted(tmp_path: Path, tokenizer) -> None:
    rows = ["good text", "", "   ", "more text", "\\ud800 lone"]
    write(tmp_path / "a.jsonl", "".join(f'{{"text": "{row}"}}\n' for row in rows) + "\n")
    write(tmp_path / "b.jsonl", "")
    corpus = open_cached(SourceSpec(str(tmp_path)), tokenizer, cache_dir=tmp_path / "cache")
    found = corpus.summary
    assert (found.documents, found.empty, found.short, found.repaired, found.files) == (3, 2, 0, 1, 2)
    assert [corpus.origin(i) for i in range(3)] == ["a.jsonl:1", "a.jsonl:4", "a.jsonl:5"]
    assert tokenizer.decode(corpus.tokens(2).tolist()) == "\ufffd lone"


@given(st.text(alphabet="ab \n", min_size=0, max_size=400), st.integers(1, 50))
@settings(deadline=None)
def test_split_points_of_a_document_depend_on_its_text_alone(text: str, step: int) -> None:
    before, readers.SEGMENT_CHARS = SEGMENT_CHARS, 40
    try:
        whole = [s.text for s in split_segments(iter([(1, text, True)]), 0)]
        parts = [(1, text[i : i + step], False) for i in range(0, len(text), step)]
        dripped = list(split_segments(iter([*parts, (1, "", True)]), 0))
    finally:
        readers.SEGMENT_CHARS = before
    assert [s.text for s in dripped] == whole
    assert "".join(whole) == text
    assert max(map(len, whole)) <= 40
    assert [s.first for s in dripped] == [True] + [False] * (len(whole) - 1)
    assert [s.last for s in dripped] == [False] * (len(whole) - 1) + [True]


def test_documents_of_one_token_have_nothing_to_predict(tmp_path: Path, tokenizer) -> None:
    bare = dataclasses.replace(TokenizerSpec.of(tokenizer), suffix=())  # no end token that would make it two
    source = SourceSpec(str(write(tmp_path / "a.txt", "the\nthe of and\n\nthe\n")), documents="lines")
    found = open_cached(source, bare, cache_dir=tmp_path / "cache").summary
    assert (found.documents, found.short, found.empty) == (1, 2, 1)


def test_generated_texts_are_a_source_too(tmp_path: Path, tokenizer) -> None:
    texts = ["one\ntwo", "drei ü"]
    source = write_texts("made", iter(texts), tmp_path / "kept")
    first = open_cached(source, tokenizer, cache_dir=tmp_path / "cache")
    assert [tokenizer.decode(first.tokens(i).tolist()) for i in range(2)] == texts
    again = open_cached(
        write_texts("made", texts, tmp_path / "kept"), tokenizer, cache_dir=tmp_path / "cache"
    )
    assert again.fingerprint == first.fingerprint
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["made.jsonl"]


def test_writing_the_same_rows_again_does_not_replace_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = write_texts("made", ["one", "two"], tmp_path).files
    before = path.stat()
    assert write_texts("made", ["one", "two"], tmp_path).files == (path,)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    write_texts("made", ["one", "three"], tmp_path)
    assert "three" in path.read_text()

    def no_links(*paths: object) -> None:
        raise OSError("not on this file system")

    monkeypatch.setattr(sources.os, "link", no_links)
    write_texts("made", ["four"], tmp_path)
    assert "four" in path.read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["made.jsonl"]


def test_a_field_of_a_table_keeps_its_line_breaks(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", 'text,n\n"Q: the cat?\nA:\n",1\n"\nx",2\n')
    assert documents(path) == ["Q: the cat?\nA:\n", "\nx"]
