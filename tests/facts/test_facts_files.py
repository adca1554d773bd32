"""File writes are atomic: a file has the new or the old content, also on a full disk and with concurrent writers."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import pytest

from trimtab.facts.files import (
    read_json_object,
    sha256_of,
    sync_file,
    temporary_path,
    write_atomic,
    write_json,
)


@pytest.mark.parametrize("content", ["Grüße\r\n", b"\x00\xff\r\n", "", b""])
def test_content_is_written_unchanged(tmp_path: Path, content: str | bytes) -> None:
    write_atomic(tmp_path / "a", content)
    assert (tmp_path / "a").read_bytes() == (content.encode() if isinstance(content, str) else content)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("function", ["os.fsync", "os.replace"])
def test_a_failed_write_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    write_atomic(tmp_path / "a", "old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(function, full)
    with pytest.raises(OSError, match="No space left"):
        write_atomic(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_errors_name_the_file_and_not_its_temporary_name(tmp_path: Path) -> None:
    for path in (tmp_path / "no-folder" / "a", tmp_path / ("a" * 300)):
        with pytest.raises(OSError, match=r".") as error:
            write_atomic(path, "x")
        assert error.value.filename == str(path)


def test_durable_writes_fsync_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    done: list[str] = []
    real_sync, real_replace = os.fsync, os.replace
    monkeypatch.setattr("os.fsync", lambda fd: (done.append("sync"), real_sync(fd)))
    monkeypatch.setattr("os.replace", lambda a, b: (done.append("rename"), real_replace(a, b)))
    write_atomic(tmp_path / "a", "x")
    assert done == ["sync", "rename", "sync"]
    write_atomic(tmp_path / "a", "y", durable=False)
    assert done[3:] == ["rename"]


def test_threads_that_write_one_file_do_not_share_a_temporary_name(tmp_path: Path) -> None:
    assert temporary_path(tmp_path / "a") != temporary_path(tmp_path / "a")
    texts = [str(i) * 100_000 for i in range(8)]
    threads = [threading.Thread(target=write_atomic, args=(tmp_path / "a", text)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "a").read_text() in texts
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_json_preserves_key_order_and_file_names_that_are_not_utf8(tmp_path: Path) -> None:
    data = {"b": "ü", "a": ["name-\udcfc.txt", None, 1.5]}
    write_json(tmp_path / "a.json", data)
    found = read_json_object(tmp_path / "a.json")
    assert found == data
    assert list(found) == ["b", "a"]
    assert "ü" in (tmp_path / "a.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\x00", b"\xff\xfe{}", b"[" * 100_000, b'"a"', b"null"]
)
def test_json_that_is_not_an_object_raises(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"."):
        read_json_object(tmp_path / "a.json")


def test_checksums_equal_hashlibs(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc" * 1_000_000)
    sync_file(tmp_path / "a")
    assert sha256_of(tmp_path / "a") == hashlib.sha256(b"abc" * 1_000_000).hexdigest()
