"""Content fingerprints, which identify the data for caches and on resume.

A file's digest covers all its bytes. It is cached with the file's size, times and inode, so that the next run
does not read 100 GB to find that nothing changed. Streaming digests samples only.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from string import hexdigits
from typing import Any

from trimtab.data.detection import detect
from trimtab.data.interface import Progress, ProgressCallback, silent
from trimtab.data.readers_csv import delimiter_of, usual_delimiter
from trimtab.data.sources import ResolvedSource
from trimtab.data.spec import UNKNOWN_SIZE
from trimtab.facts.errors import DataError
from trimtab.facts.files import read_json_object, write_json

BLOCK = 1 << 20
MIN_AGE_NS = 2_000_000_000
"""A digest is cached only if the file was last modified at least this long ago: the coarsest clock resolution."""


@dataclass(frozen=True)
class FileStamp:
    """The identity of a source's file when it was read."""

    name: str
    size: int
    digest: str
    stat: tuple[int, int, int, int]


def digest_of(*parts: object) -> str:
    """A 128-bit digest of plain data.

    Example:
        >>> digest_of("a", 1) == digest_of("a", 1) != digest_of("a", "1")
        True
    """
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def stat_of(path: Path) -> tuple[int, int, int, int]:
    """(size, mtime, ctime, inode), which changes whenever the file is written."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def hash_file(path: Path) -> str:
    """Digest of all bytes."""
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb", buffering=0) as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def sample_file(path: Path) -> str:
    """Digest of the size and 32 samples of 32 KiB, including the first and last."""
    size, sample_size = path.stat().st_size, 1 << 15
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    with open(path, "rb", buffering=0) as file:
        for i in range(32):
            file.seek(max(0, size - sample_size) * i // 31)
            digest.update(file.read(sample_size))
    return "sampled-" + digest.hexdigest()


def stamp_files(
    source: ResolvedSource,
    digest_folder: Path | None,
    *,
    sampled: bool = False,
    progress: ProgressCallback = silent,
) -> list[FileStamp]:
    """Returns the stamps of a source's files; `digest_folder` is the folder where digests are cached."""
    if source.spec.rows is not None:
        return [FileStamp(source.files[0].name, UNKNOWN_SIZE, source.spec.rows.name, (0, 0, 0, 0))]
    total, done = 0, 0
    stats = []
    for file in source.files:
        try:
            stats.append(stat_of(file.path))
            with open(file.path, "rb"):
                pass
        except OSError as error:
            raise DataError(
                f"{file.path} cannot be read ({error.strerror})", "check that it exists and is readable"
            ) from error
        total += stats[-1][0]

    def digest(index: int) -> str:
        if sampled:
            return sample_file(source.files[index].path)
        return cached_digest(source.files[index].path, stats[index], digest_folder, hash_file)

    stamps = []
    with ThreadPoolExecutor(4) as threads:
        for file, stat, file_digest in zip(
            source.files, stats, threads.map(digest, range(len(stats))), strict=True
        ):
            done += stat[0]
            progress(Progress("hash", source.spec.name, done, total))
            stamps.append(FileStamp(file.name, stat[0], file_digest, stat))
    return stamps


def cached_digest(
    path: Path, stat: tuple[int, int, int, int], digest_folder: Path | None, read: Callable[[Path], str]
) -> str:
    """Returns a file's digest in hexadecimal; reads the file only if there is no valid cached digest.

    A cached digest is valid while the file has the same size, times and inode. A digest is cached only if the
    file was not modified shortly before it was read: a write within the clock's resolution would not change
    the times.

    Args:
        path: the file.
        stat: `stat_of` it.
        digest_folder: the folder of cached digests; if it cannot be used, the file is always read.
        read: computes the digest of all bytes; use one such function per folder.
    """
    if digest_folder is None:
        return read(path)
    cache_file = digest_folder / f"{digest_of(str(path.resolve()))}.json"
    known = _cached_digest(cache_file, stat)
    if known is not None:
        return known
    began = time.time_ns()
    digest = read(path)
    if began - max(stat[1], stat[2]) > MIN_AGE_NS and stat_of(path) == stat:
        with suppress(OSError):
            digest_folder.mkdir(parents=True, exist_ok=True)
            write_json(cache_file, {"stat": list(stat), "digest": digest}, durable=False)
    return digest


def _cached_digest(cache_file: Path, stat: tuple[int, int, int, int]) -> str | None:
    """The cached digest of an unchanged file; None if it is missing, incomplete or outdated."""
    try:
        cached = read_json_object(cache_file)
        digest = cached["digest"]
        return digest if cached["stat"] == list(stat) and set(digest) <= set(hexdigits) else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def content_fingerprint(source: ResolvedSource, stamps: Iterable[FileStamp]) -> str:
    """Digest of contents, reading order, and the settings that affect the documents."""
    spec = source.spec
    kinds = [[file.kind, file.compression] for file in source.files]
    digests = [stamp.digest for stamp in stamps]
    settings: list[Any] = [spec.text_column, spec.documents, spec.first]
    if source.form is not None:
        settings += [source.form.name, dict(source.form.columns), spec.train_on, dict(spec.variables)]
        settings += [spec.bad_rows]
    # A file with the delimiter that its name implies keeps the digest from before delimiters were detected.
    csv_files = [(i, delimiter_of(file), file) for i, file in enumerate(source.files) if file.kind == "csv"]
    others = [[i, delimiter] for i, delimiter, file in csv_files if delimiter != usual_delimiter(file)]
    return digest_of(1, digests, kinds, *settings, *others)


def as_resumed(
    source: ResolvedSource,
    digest_folder: Path | None,
    *,
    sampled: bool = False,
    progress: ProgressCallback = silent,
) -> ResolvedSource:
    """Returns the source of a resumed run as it was read when the run began; returns that of a new run unchanged.

    Earlier versions inferred the delimiter of a CSV file from its name. If the run's data has the fingerprint of that
    delimiter, it is used again. `digest_folder`, `sampled` and `progress` are those of `stamp_files`.
    """
    original = source.spec.original_fingerprints
    if original is None:
        return source
    accepted = [dataclasses.replace(file, accepted=True) for file in source.files]
    source = dataclasses.replace(source, files=tuple(accepted))
    if not any(file.kind == "csv" for file in accepted):
        return source
    by_name = [
        dataclasses.replace(file, delimiter=usual_delimiter(file)) if file.kind == "csv" else file
        for file in accepted
    ]
    before = dataclasses.replace(source, files=tuple(by_name))
    try:
        before = dataclasses.replace(before, form=detect(before))
    except DataError:
        return source  # no run can have begun with that delimiter
    stamps = stamp_files(before, digest_folder, sampled=sampled, progress=progress)
    return before if content_fingerprint(before, stamps) in original else source


def check_unchanged(source: ResolvedSource, stamps: Iterable[FileStamp]) -> None:
    """Raises a DataError if a file was written to while it was being read."""
    for file, stamp in zip(source.files, stamps, strict=True):
        if not file.path.exists() or stat_of(file.path) != stamp.stat:
            raise DataError(f"{file.path} changed while it was being read", "run again when it is complete")
