"""The token cache: one folder per entry, memory-mapped, published by a rename, verified before use.

<cache>/entries/<key>/tokens.bin       all ids, uint16 or uint32
                      documents.bin    one record per document: end, row, content hash, file
                      trained.bin      the loss mask, only of examples: one byte per token, 1 if trained on
                      meta.json        counts, checksums, skipped documents
                      verified.json    size, times and inode of these files at the last verification
<cache>/locks/<key>.lock               OS lock while an entry is built; it ends with its process
<cache>/digests/                       digests of source files (fingerprints.py)
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.data.fingerprints import digest_of, hash_file, stat_of
from trimtab.data.selection import SourceCounts
from trimtab.facts.errors import ResourceError
from trimtab.facts.files import read_json_object, sync_folder, write_json
from trimtab.facts.units import format_bytes

VERSION = 2
RECORD = np.dtype([("end", "<i8"), ("row", "<i8"), ("hash", "<u8"), ("file", "<i4"), ("unused", "<i4")])
FILES = ("tokens.bin", "documents.bin")
MASK = "trained.bin"
_SKIPPED = ("empty", "short", "repaired")
_SKIPPED_EXAMPLES = ("bad", "untrained", "unanswered", "rewritten", "trained")
"""Keys of `skipped` in meta.json: of every entry, and additional ones of examples."""

_ELSEWHERE = "use another folder: data.cache_dir in a recipe, --cache-dir of `trimtab eval`"


@dataclass(frozen=True)
class EntryMeta:
    """The description of an entry, `meta.json`."""

    dtype: str
    num_tokens: int
    num_documents: int
    max_id: int
    checksums: Mapping[str, str]
    """The checksum of each file, by file name."""
    counts: SourceCounts

    @property
    def masked(self) -> bool:
        """Whether the entry has a loss mask."""
        return MASK in self.checksums

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        counts = self.counts
        skipped: dict[str, Any] = {name: getattr(counts, name) for name in _SKIPPED}
        if self.masked:
            skipped |= {name: getattr(counts, name) for name in _SKIPPED_EXAMPLES}
        if counts.first_error:
            skipped["complaint"] = counts.first_error
        return {
            "skipped": skipped,
            "version": VERSION,
            "dtype": self.dtype,
            "num_tokens": self.num_tokens,
            "num_documents": self.num_documents,
            "max_id": self.max_id,
            "checksums": dict(self.checksums),
        }

    @staticmethod
    def from_dict(saved: Mapping[str, Any]) -> EntryMeta:
        """The inverse of `to_dict`; raises DamagedEntry for another version."""
        if saved["version"] != VERSION:
            raise DamagedEntry("meta.json has another version")
        skipped = dict(saved["skipped"])
        first_error = skipped.pop("complaint", "")
        return EntryMeta(
            saved["dtype"],
            saved["num_tokens"],
            saved["num_documents"],
            saved.get("max_id", 0),
            saved["checksums"],
            SourceCounts(**skipped, first_error=first_error),
        )


@dataclass(frozen=True)
class CacheEntry:
    """An opened entry: `tokens` [tokens], `records` [documents] and, for examples, `trained` [tokens] are
    memory-mapped.
    """

    path: Path
    tokens: np.ndarray
    records: np.ndarray
    meta: EntryMeta
    trained: np.ndarray | None = None


class Writer:
    """Appends documents to the files of an entry, with bounded memory."""

    def __init__(self, folder: Path, dtype: str, *, masked: bool = False) -> None:
        self.dtype = np.dtype(dtype)
        self.masked = masked
        self.num_tokens = self.num_documents = self.max_id = 0
        self._names = (*FILES, MASK) if masked else FILES
        self._files = [open(folder / name, "wb", buffering=1 << 20) for name in self._names]  # noqa: SIM115
        self._digests = [hashlib.blake2b(digest_size=16) for _ in self._names]
        self._records = np.zeros(4096, RECORD)
        self._filled = 0
        self._folder = folder

    def append_tokens(self, ids: np.ndarray, trained: np.ndarray | None = None) -> None:
        """Adds ids to the current document; `trained` [tokens] is their loss mask, if the entry has one."""
        if len(ids):
            if self.masked:
                mask = np.ones(len(ids), np.uint8) if trained is None else trained
                assert mask.dtype == np.uint8, mask.dtype
                assert len(mask) == len(ids), (len(mask), len(ids))
                self._write(len(FILES), mask.tobytes())
            top = int(ids.max())
            self.max_id = max(self.max_id, top)
            assert top <= np.iinfo(self.dtype).max, (top, self.dtype)
            self._write(0, ids.astype(self.dtype).tobytes())
            self.num_tokens += len(ids)

    def end_document(self, file: int, row: int, content_hash: int) -> None:
        """Ends the current document."""
        self._records[self._filled] = (self.num_tokens, row, content_hash, file, 0)
        self._filled += 1
        self.num_documents += 1
        if self._filled == len(self._records):
            self._flush_records()

    def finish(self, counts: SourceCounts) -> None:
        """Flushes the buffers, syncs the files to disk and writes `meta.json`."""
        self._flush_records()
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
        self.close()
        meta = EntryMeta(
            self.dtype.name,
            self.num_tokens,
            self.num_documents,
            self.max_id,
            {name: d.hexdigest() for name, d in zip(self._names, self._digests, strict=True)},
            counts,
        ).to_dict()
        write_json(self._folder / "meta.json", {"meta": meta, "checksum": digest_of(meta)})
        _remember_verified(self._folder, self._names)

    def close(self) -> None:
        """Closes the files; idempotent."""
        for file in self._files:
            file.close()

    def _flush_records(self) -> None:
        self._write(1, self._records[: self._filled].tobytes())
        self._filled = 0

    def _write(self, which: int, data: bytes) -> None:
        self._files[which].write(data)
        self._digests[which].update(data)


class TokenCache:
    """A folder of entries.

    Example:
        >>> cache = TokenCache(Path("~/.cache/trimtab/tokens").expanduser())          # doctest: +SKIP
        >>> entry = cache.get_or_build(key, build, dtype="uint16", need_bytes=10**6)  # doctest: +SKIP
    """

    def __init__(self, folder: Path, on_message: Callable[[str], None]) -> None:
        self.folder = folder
        self.on_message = on_message
        try:
            for name in ("entries", "locks", "digests"):
                (folder / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ResourceError(
                f"the token cache {folder} cannot be created ({error.strerror})",
                _ELSEWHERE,
            ) from error

    @property
    def digests(self) -> Path:
        """The folder where digests of source files are cached."""
        return self.folder / "digests"

    def get_or_build(
        self,
        key: str,
        build: Callable[[Writer], SourceCounts],
        *,
        dtype: str,
        need_bytes: int,
        masked: bool = False,
    ) -> CacheEntry:
        """Returns the entry of this key; `build(writer)` builds it if it is missing or damaged.

        Processes that need the same entry wait for the one that builds it. `masked` entries have a loss mask.
        """
        path = self.folder / "entries" / key
        entry = self._open(path)
        if entry is not None:
            return entry
        with self._lock(key):
            entry = self._open(path)  # another process may have built it in the meantime
            if entry is not None:
                return entry
            self._build(path, build, dtype, need_bytes, masked)
        entry = self._open(path)
        assert entry is not None, "an entry that was just written must be readable"
        return entry

    def _open(self, path: Path) -> CacheEntry | None:
        if not path.exists():
            return None
        try:
            return open_entry(path)
        except DamagedEntry as damage:
            self.on_message(f"the token cache entry {path.name} is damaged ({damage}); it is rebuilt")
            return None

    def _build(
        self,
        path: Path,
        build: Callable[[Writer], SourceCounts],
        dtype: str,
        need_bytes: int,
        masked: bool,
    ) -> None:
        part = path.with_name(f".building-{path.name}")  # only the process that has the lock builds an entry
        shutil.rmtree(part, ignore_errors=True)
        free = shutil.disk_usage(path.parent).free
        if free < need_bytes:
            raise ResourceError(
                f"the token cache needs about {format_bytes(need_bytes)} in {self.folder}"
                f" and {format_bytes(free)} are free",
                f"free some space, or {_ELSEWHERE}",
            )
        writer = None
        try:
            part.mkdir()
            writer = Writer(part, dtype, masked=masked)
            writer.finish(build(writer))
            if path.exists():
                shutil.rmtree(path)
            os.rename(part, path)
            sync_folder(path.parent)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EFBIG):
                raise
            raise ResourceError(
                f"the token cache {self.folder} cannot be written ({error.strerror})",
                f"free some space, or {_ELSEWHERE}",
            ) from error
        finally:
            if writer is not None:
                _close_quietly(writer)
            shutil.rmtree(part, ignore_errors=True)

    @contextmanager
    def _lock(self, key: str) -> Iterator[None]:
        try:
            file = open(self.folder / "locks" / f"{key}.lock", "w")  # noqa: SIM115  closed below
        except OSError as error:
            raise ResourceError(
                f"the token cache {self.folder} cannot be written ({error.strerror})",
                _ELSEWHERE,
            ) from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.on_message("another process is tokenizing the same data; waiting for it")
                fcntl.flock(file, fcntl.LOCK_EX)
            yield


class DamagedEntry(Exception):
    """An entry that fails verification; the message says why."""


def open_entry(path: Path) -> CacheEntry:
    """Memory-maps an entry after checking it: sizes always, checksums unless the files are unchanged since
    the last check.
    """
    try:
        outer = read_json_object(path / "meta.json")
        if outer["checksum"] != digest_of(outer["meta"]):
            raise DamagedEntry("the checksum of meta.json differs")
        meta = EntryMeta.from_dict(outer["meta"])
        dtype = np.dtype(meta.dtype)
        expected = {
            "tokens.bin": meta.num_tokens * dtype.itemsize,
            "documents.bin": meta.num_documents * RECORD.itemsize,
        }
        if meta.masked:
            expected[MASK] = meta.num_tokens
        for name, size in expected.items():
            if (path / name).stat().st_size != size:
                raise DamagedEntry(f"{name} does not have {size} bytes")
        _verify(path, meta.checksums)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedEntry(str(error)) from error
    trained = _map(path / MASK, np.dtype(np.uint8)) if meta.masked else None
    return CacheEntry(
        path, _map(path / "tokens.bin", dtype), _map(path / "documents.bin", RECORD), meta, trained
    )


def _verify(path: Path, checksums: Mapping[str, str]) -> None:
    try:
        verified = read_json_object(path / "verified.json")
    except (OSError, ValueError):
        verified = {}
    stale = [name for name in checksums if verified.get(name) != list(stat_of(path / name))]
    for name in stale:
        if hash_file(path / name) != checksums[name]:
            raise DamagedEntry(f"the checksum of {name} differs")
    if stale and os.access(path, os.W_OK):
        _remember_verified(path, checksums)


def _remember_verified(path: Path, names: Iterable[str]) -> None:
    write_json(path / "verified.json", {name: stat_of(path / name) for name in names}, durable=False)


def _map(path: Path, dtype: np.dtype) -> np.ndarray:
    if path.stat().st_size == 0:
        return np.empty(0, dtype)
    # A plain array over the memory map: slicing np.memmap itself is several times slower.
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))


def _close_quietly(writer: Writer) -> None:
    """Closes the files and ignores a full disk: closing flushes, which fails again after the first error."""
    try:
        writer.close()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise


def entry_key(content: str, tokenizer: str, framing: list[list[int]], settings: list[Any]) -> str:
    """The name of an entry: a digest of the content, the tokenizer and the settings."""
    assert tokenizer, "a tokenizer has a fingerprint"
    return digest_of(VERSION, content, tokenizer, framing, settings)
