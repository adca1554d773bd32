"""Checksums of a base's files: cached, refreshed after any write, and not trusted if a write could be hidden."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import pytest

from trimtab.data import fingerprints
from trimtab.facts import files
from trimtab.facts.base_weights import BaseWeights
from trimtab.facts.errors import CheckpointError
from trimtab.run import base_weights
from trimtab.run.base_weights import cached_digests, check_base


@pytest.fixture(autouse=True)
def reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Names of the files that were read, as a live list. Checksums of small and of new files are cached too."""
    found: list[str] = []
    plain = files.digest

    def noted(path: Path) -> files.FileDigest:
        found.append(path.name)
        return plain(path)

    monkeypatch.setattr(base_weights, "digest", noted)
    monkeypatch.setattr(base_weights, "MIN_CACHED_BYTES", 4)
    monkeypatch.setattr(fingerprints, "MIN_AGE_NS", -(10**12))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return found


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def weights(folder: Path, *contents: bytes) -> list[Path]:
    folder.mkdir(exist_ok=True)
    paths = [folder / f"model-{i}.safetensors" for i in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    return paths


def notes(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "home" / ".cache" / "trimtab" / "checksums").glob("*"))


def test_a_file_is_read_once_and_reread_after_a_write(tmp_path: Path, reads: list[str]) -> None:
    paths = weights(tmp_path / "base", b"first", b"second")
    expected = {path.name: files.FileDigest(path.stat().st_size, sha256(path.read_bytes())) for path in paths}
    assert cached_digests(paths) == expected
    assert sorted(reads) == [path.name for path in paths]
    reads.clear()
    assert cached_digests(reversed(paths)) == expected
    assert list(cached_digests(reversed(paths))) == sorted(expected)
    assert reads == []
    assert [path.suffix for path in notes(tmp_path)] == [".json", ".json"], "nothing half written is left"
    paths[1].write_bytes(b"SECOND")
    assert cached_digests(paths)[paths[1].name].sha256 == sha256(b"SECOND")
    assert reads == [paths[1].name]


def test_a_write_with_a_restored_mtime_is_detected(tmp_path: Path, reads: list[str]) -> None:
    """As `rsync --times --inplace` and `touch -r` do."""
    (path,) = weights(tmp_path / "base", b"before")
    cached_digests([path])
    stat = path.stat()
    time.sleep(0.05)
    path.write_bytes(b"behind")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    assert cached_digests([path])[path.name].sha256 == sha256(b"behind")


def test_a_replaced_file_is_detected(tmp_path: Path, reads: list[str]) -> None:
    one, two = weights(tmp_path / "base", b"one of them", b"the other 1")
    link = tmp_path / "base" / "link"
    link.symlink_to(one)
    assert cached_digests([link])["link"].sha256 == sha256(b"one of them")
    link.unlink()
    link.symlink_to(two)
    assert cached_digests([link])["link"].sha256 == sha256(b"the other 1")
    os.replace(two, one)
    assert cached_digests([one])[one.name].sha256 == sha256(b"the other 1")


def test_a_checksum_of_a_new_file_is_not_cached(
    tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprints, "MIN_AGE_NS", 2_000_000_000)
    (path,) = weights(tmp_path / "base", b"fresh")
    cached_digests([path])
    assert notes(tmp_path) == []
    os.utime(path, ns=(0, 0))  # an old file by one of its times, as copies with their times kept are
    cached_digests([path])
    assert notes(tmp_path) == []
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now + 3_000_000_000)
    cached_digests([path])
    assert len(notes(tmp_path)) == 1
    reads.clear()
    cached_digests([path])
    assert reads == []


def test_a_checksum_of_a_changing_file_is_not_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = weights(tmp_path / "base", b"before")
    plain = files.digest

    def written_meanwhile(path: Path) -> files.FileDigest:
        found = plain(path)
        time.sleep(0.05)
        path.write_bytes(b"behind")
        return found

    monkeypatch.setattr(base_weights, "digest", written_meanwhile)
    cached_digests([path])
    assert notes(tmp_path) == []


def test_small_files_are_always_read(
    tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_weights, "MIN_CACHED_BYTES", 6)
    paths = weights(tmp_path / "base", b"small", b"not small")
    for _ in range(2):
        cached_digests(paths)
    assert sorted(reads) == [paths[0].name, paths[0].name, paths[1].name]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff", b'{"stat": []}', b"[" * 100_000, "sha", "bytes"],
    ids=["empty", "torn", "list", "null", "no text", "no key", "deep", "no checksum", "of another file"],
)
def test_a_damaged_cache_entry_is_ignored(content: bytes | str, tmp_path: Path, reads: list[str]) -> None:
    (path,) = weights(tmp_path / "base", b"weights")
    cached_digests([path])
    (note,) = notes(tmp_path)
    whole = note.read_text()
    if content == "sha":
        content = whole.replace(sha256(b"weights"), "z" * 64).encode()
    elif content == "bytes":
        found = json.loads(whole)
        content = json.dumps({**found, "stat": [8, *found["stat"][1:]]}).encode()
    assert content != whole.encode()
    note.write_bytes(content)
    reads.clear()
    assert cached_digests([path])[path.name].sha256 == sha256(b"weights")
    assert reads == [path.name]
    assert note.read_text() == whole


def test_an_unusable_cache_folder_is_ignored(
    tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = weights(tmp_path / "base", b"weights")
    (tmp_path / "home").write_text("a file where a folder should be")
    assert cached_digests([path])[path.name].sha256 == sha256(b"weights")
    monkeypatch.setattr(Path, "home", _no_home)
    assert cached_digests([path])[path.name].sha256 == sha256(b"weights")
    assert len(reads) == 2
    full = tmp_path / "full"
    full.mkdir()
    monkeypatch.setattr(os, "replace", _no_space)
    assert cached_digests([path], full)[path.name].sha256 == sha256(b"weights")
    assert list(full.iterdir()) == []


def _no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def _no_space(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_base_is_checked_without_reading_it_twice(tmp_path: Path, reads: list[str]) -> None:
    place = tmp_path / "base"
    place.mkdir()
    path = place / "model.safetensors"
    path.write_bytes(b"weights")
    base = BaseWeights("some/base", files={path.name: files.FileDigest(7, sha256(b"weights"))})
    for _ in range(3):
        check_base(base, place)
    assert reads == [path.name]
    (note,) = notes(tmp_path)
    note.write_text(note.read_text().replace(sha256(b"weights"), "0" * 64))
    check_base(base, place)  # a wrong note does not lock the run out
    path.write_bytes(b"others!")
    with pytest.raises(CheckpointError, match="different content"):
        check_base(base, place)
