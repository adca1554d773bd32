"""Rows from Python: every container, plain values, and streams that can be read again."""

from __future__ import annotations

import datetime
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from trimtab.data import in_memory
from trimtab.data.formats import type_name
from trimtab.data.in_memory import RowStream, first_difference, iterate, lines_of, spool_rows
from trimtab.facts.errors import DataError


class Frame:
    """The part of pandas.DataFrame that is used."""

    columns = ("text", "score")

    def itertuples(self, *, index: bool, name: str | None) -> Iterator[tuple[Any, ...]]:
        assert (index, name) == (False, None)
        return iter([("a", np.float64("nan")), ("b", np.float64(2.5))])


class Polars:
    """The part of polars.DataFrame that is used."""

    def iter_rows(self, *, named: bool) -> Iterator[dict[str, Any]]:
        assert named
        return iter([{"text": "a"}])


class HfDataset:
    """Like datasets.Dataset: iterable, sized, rows as dicts."""

    column_names = ("text",)

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[dict[str, str]]:
        return iter([{"text": "a"}, {"text": "b"}])


@pytest.mark.parametrize(
    ("rows", "lines"),
    [
        (["a", "b"], ['"a"', '"b"']),
        (iter(["a"]), ['"a"']),
        (lambda: iter(["a"]), ['"a"']),
        (Frame(), ['{"text": "a", "score": null}', '{"text": "b", "score": 2.5}']),
        (Polars(), ['{"text": "a"}']),
        (pa.table({"text": ["a", "b"]}), ['{"text": "a"}', '{"text": "b"}']),
        (HfDataset(), ['{"text": "a"}', '{"text": "b"}']),
        (
            [({"role": "user", "content": "x"},)],
            ['{"messages": [{"role": "user", "content": "x"}]}'],
        ),
        ([{"n": np.int64(3), "v": np.array([1, 2])}], ['{"n": 3, "v": [1, 2]}']),
    ],
)
def test_rows_of_every_container(rows: Any, lines: list[str]) -> None:
    assert list(lines_of(rows, "data")) == lines


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (["a", 3.5], "row 2 of data is 3.5 (float)"),
        ([None], "row 1 of data is None (NoneType)"),
        ([{"text": "a"}, b"b"], "row 2 of data is b'b' (bytes)"),
        ([[1, 2]], "row 1 of data is [1, 2] (list)"),
        (["a", {"text": "b"}], "row 2 of data is an object, and row 1 is a text"),
        (7, "data is 7 (int), which has no rows"),
    ],
)
def test_bad_rows_are_named_by_number(rows: Any, expected: str) -> None:
    with pytest.raises(DataError) as raised:
        list(lines_of(rows, "data"))
    assert raised.value.cause == expected


def test_values_that_json_does_not_have_are_named_by_their_type() -> None:
    (line,) = lines_of([{"text": "a", "when": datetime.date(2026, 1, 2)}], "data")
    row = json.loads(line)
    assert row["text"] == "a"
    assert type_name(row["when"]) == "a date"


def test_equal_rows_have_one_file_and_other_rows_another(tmp_path: Path) -> None:
    first = spool_rows(["a", "b"], tmp_path)
    assert spool_rows(iter(["a", "b"]), tmp_path) == first
    assert first.path.read_text() == '"a"\n"b"\n'
    other = spool_rows(["a", "c"], tmp_path)
    assert other.name != first.name
    assert first_difference(first.path, other.path) == 2
    assert first_difference(first.path, first.path) is None
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([first.path.name, other.path.name])


def test_rows_under_a_key_are_read_once(tmp_path: Path) -> None:
    assert not spool_rows(["a"], tmp_path, key="mine").reused

    def never() -> Iterator[str]:
        raise AssertionError

    again = spool_rows(never, tmp_path, key="mine")
    assert (again.reused, again.path.read_text()) == (True, '"a"\n')


def test_an_error_in_a_generator_propagates_and_leaves_no_file(tmp_path: Path) -> None:
    def failing() -> Iterator[str]:
        yield "a"
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        spool_rows(failing(), tmp_path)
    with pytest.raises(DataError, match="data has no rows"):
        spool_rows([], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_stream_can_be_read_again_within_its_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_memory, "BUFFER_BYTES", 80)
    rows = [f"row {i:03}" for i in range(1, 101)]
    once, many = RowStream(iter(rows)), RowStream(rows)
    assert once.name == many.name != RowStream(rows, key="mine").name == "mine"
    for stream in (once, many):
        assert list(stream.values(98)) == [(98, "row 098"), (99, "row 099"), (100, "row 100")]
        assert next(stream.values(97)) == (97, "row 097")
    assert next(many.values(1)) == (1, "row 001")
    with pytest.raises(DataError, match="data is an iterator, and its row 1 cannot be read a second time"):
        next(once.values(1))


def test_a_stream_checks_the_rows_before_a_position() -> None:
    rows = [f"row {i}" for i in range(1, 41)]
    digest = RowStream(rows).digest_before(30)
    RowStream(iter(rows)).check(30, digest)
    with pytest.raises(DataError, match="the rows before row 30 are not those"):
        RowStream([*rows[:20], "other", *rows[21:]]).check(30, digest)
    with pytest.raises(DataError, match="ends before row 30"):
        RowStream(rows[:10]).check(30, digest)
    assert list(iterate(rows)) == rows


def test_an_iterator_of_large_rows_is_read_from_its_first_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab.data.in_memory.BUFFER_BYTES", 100)
    stream = RowStream(iter([f"{number} " + "x" * 30 for number in range(1, 41)]))
    assert [value.split()[0] for _, value in stream.values(1)] == [str(number) for number in range(1, 41)]


def test_rows_are_on_the_disk_before_they_have_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    for name in ("fsync", "link"):
        call = getattr(os, name)

        def noted(*words: Any, call: Any = call, name: str = name) -> Any:
            done.append(name)
            return call(*words)

        monkeypatch.setattr(os, name, noted)
    spooled = spool_rows(["a", "b"], tmp_path, key="mine")
    assert done == ["fsync", "link", "fsync"]  # the file, its name, the folder
    assert spooled.path.read_text() == '"a"\n"b"\n'
    assert [path.name for path in tmp_path.iterdir()] == ["mine.jsonl"]


def test_drafts_of_killed_writers_are_removed_and_those_of_others_are_not(tmp_path: Path) -> None:
    stale, young, locked = (tmp_path / f".rows.{number}.part" for number in range(3))
    for path in (stale, young, locked):
        path.write_text("{")
    for path in (stale, locked):
        os.utime(path, (1, 1))
    with open(locked) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="no rows"):
            spool_rows([], tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {young.name, locked.name}
