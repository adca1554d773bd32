"""CSV as spreadsheets and databases write it: delimiters are detected, a missing header is an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from trimtab.data.detection import detect
from trimtab.data.fingerprints import content_fingerprint, stamp_files
from trimtab.data.preview import describe_beginning
from trimtab.data.readers import SegmentReader
from trimtab.data.readers_csv import delimiter_of
from trimtab.data.sources import ResolvedSource, SourceSpec, resolve
from trimtab.facts.errors import DataError


def source_of(path: Path, content: str, **settings: object) -> ResolvedSource:
    path.write_text(content)
    return resolve(SourceSpec(str(path), **settings))  # type: ignore[arg-type]


def texts(source: ResolvedSource) -> list[str]:
    return [segment.text for segment in SegmentReader(source)]


@pytest.mark.parametrize(("between", "named"), [(";", "semicolons"), ("\t", "tabs"), ("|", "vertical bars")])
def test_another_delimiter_is_detected_and_shown(tmp_path: Path, between: str, named: str) -> None:
    rows = [["id", "text"], ["1", "one, two"], ["2", "three"], ["3", '"a ' + between + ' in quotes"']]
    source = source_of(tmp_path / "a.csv", "".join(between.join(row) + "\n" for row in rows))
    assert texts(source) == ["one, two", "three", f"a {between} in quotes"]
    assert (
        describe_beginning(source) == f"text column 'text', separated by {named}; first document: 'one, two'"
    )
    assert [s.text for s in SegmentReader(source, row=2)] == ["three", f"a {between} in quotes"]


@pytest.mark.parametrize(
    "content",
    [
        "text\none; two\nthree\n",
        'text\n"one; two, three"\nfour; five\n',
        "a,text\n1,x; y\n2,z; w\n",
        "a;b,text\n1,x\n2,z\n",
        'text\n"a\tb"\n',
        "text\n",
        "",
    ],
)
def test_commas_are_used_if_the_header_has_no_other_delimiter(tmp_path: Path, content: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(content or "\n")
    assert delimiter_of(resolve(SourceSpec(str(path))).files[0]) == ","


def test_semicolons_in_texts_without_quotes_are_refused(tmp_path: Path) -> None:
    source = source_of(tmp_path / "a.csv", "id;text\n1;one; two\n2;three\n3;four; five; six\n")
    with pytest.raises(DataError, match="put texts that contain semicolons in double quotes"):
        texts(source)


def test_the_delimiter_is_part_of_the_content_fingerprint(tmp_path: Path) -> None:
    """Earlier versions read a semicolon file as one column; those cached tokens must not be reused."""
    from trimtab.data import fingerprints

    source = source_of(tmp_path / "a.csv", "id;text\n1;one\n2;two\n")
    now = content_fingerprint(source, stamp_files(source, None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fingerprints, "delimiter_of", lambda file: ",")
        assert content_fingerprint(source, stamp_files(source, None)) != now
    plain = source_of(tmp_path / "b.csv", "id,text\n1,one\n")
    digests = [stamp.digest for stamp in stamp_files(plain, None)]
    assert content_fingerprint(plain, stamp_files(plain, None)) == fingerprints.digest_of(
        1, digests, [["csv", None]], None, "file", None
    ), "commas keep the digest that they always had, so that runs can be resumed"


@pytest.mark.parametrize(
    "first",
    [
        "The cat sat on the mat.",
        "Is this a header? I think not!",
        "x" * 100,
        "this is one line of text",
        "1",
        "3.14",
        "2024-01-31",
        '"two\nlines"',
    ],
)
def test_a_first_row_of_data_is_refused_as_a_header(tmp_path: Path, first: str) -> None:
    source = source_of(tmp_path / "a.csv", f"{first}\nAnother row here.\n")
    with pytest.raises(DataError, match=r"looks like data, not like column names.*such as `text`"):
        texts(source)
    # Following the remedy works.
    assert len(texts(source_of(tmp_path / "a.csv", f"text\n{first}\nAnother row here.\n"))) == 2


def test_a_single_row_without_a_header_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="looks like data"):
        texts(source_of(tmp_path / "a.csv", "The cat sat on the mat.\n"))


def test_column_names_that_look_like_data_can_be_set(tmp_path: Path) -> None:
    content = "2019,2020\none,two\n"
    with pytest.raises(DataError, match="if these are the column names, set text_column"):
        texts(source_of(tmp_path / "a.csv", content))
    assert texts(source_of(tmp_path / "a.csv", content, text_column="2020")) == ["two"]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", "\n  Once upon\x1b[31m a time\n", "first document: 'Once upon [31m a time'"),
        ("a.csv", "title,body\nx,y\n", "text column 'body'; first document: 'y'"),
        ("a.tsv", "title\tbody\nx\ty\n", "text column 'body'; first document: 'y'"),
        ("a.jsonl", '{"text": ""}\n{"text": "two"}\n', "text column 'text'; first document: 'two'"),
        ("a.jsonl", '"one"\n"two"\n', "rows of strings; first document: 'one'"),
        ("a.json", '[{"body": "one"}]', "text column 'body'; first document: 'one'"),
        (
            "a.jsonl",
            '{"prompt": "2 + 2 =", "completion": " 4"}\n',
            "format prompt-completion; first example: '2 + 2 = 4'",
        ),
        (
            "a.jsonl",
            '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]}\n',
            "format messages; first example: 'user: Hi assistant: Yes?'",
        ),
    ],
)
def test_the_beginning_of_a_source(tmp_path: Path, name: str, content: str, expected: str) -> None:
    import dataclasses

    source = source_of(tmp_path / name, content)
    source = dataclasses.replace(source, form=detect(source))
    assert describe_beginning(source, template=True) == expected


def test_the_beginning_of_a_folder_names_skipped_files(tmp_path: Path) -> None:
    for name in ("b.txt", "c.pdf", "a.md"):
        (tmp_path / name).write_text(f"the text of {name} " * 10)
    source = resolve(SourceSpec(str(tmp_path)))
    assert describe_beginning(source).startswith(
        "2 files, skipped (not text): c.pdf; first document: 'the text of a.md"
    )
    assert describe_beginning(source).endswith(" …'")
    assert len(describe_beginning(source)) < 150


def test_the_beginning_of_parquet(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table({"n": [1], "story": ["Once"]}), tmp_path / "a.parquet")
    assert describe_beginning(resolve(SourceSpec(str(tmp_path / "a.parquet")))) == (
        "text column 'story'; first document: 'Once'"
    )
