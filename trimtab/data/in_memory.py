"""Rows passed from Python: lists, generators, datasets and data frames, converted to JSON lines.

Rows are converted to plain JSON values once. Cached mode writes them to a file in the cache (`spool_rows`), streaming
reads them while training (`RowStream`); after that they are read like any other source.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.data.drafts import draft
from trimtab.data.formats import UNSUPPORTED
from trimtab.facts.errors import DataError, ResourceError

BUFFER_BYTES = 1 << 26
"""Bytes of a stream buffered in memory for reading them again: several chunks (`spec.chunk_tokens`), to repeat a step.
At least `HEAD_ROWS` rows are buffered; they identify the stream before its first row is trained on."""
HEAD_ROWS = 16
"""Rows at the beginning of a stream that identify it in a run folder if the user passes no key."""
NAME_DIGITS = 16
_EMPTY_DIGEST = hashlib.blake2b(digest_size=16).hexdigest()
_MISSING = ("NAType", "NaTType")
"""Types of pandas' missing values."""
_SAME_ROWS = "pass the rows that the run began with, from the first row on, or start a new run"
ROW_FORMS = (
    "pass texts, conversations (lists of {'role': …, 'content': …}) or dicts with column names as keys"
)


def iterate(rows: Any, label: str = "data") -> Iterator[Any]:
    """Iterates over the rows of a list, an iterator, a function that returns one, a `datasets.Dataset`, or a table of
    pandas, polars or pyarrow.

    Example:
        >>> list(iterate(["a", "b"]))
        ['a', 'b']
    """
    if callable(getattr(rows, "itertuples", None)) and hasattr(rows, "columns"):  # pandas.DataFrame
        names = [str(name) for name in rows.columns]
        return (dict(zip(names, values, strict=True)) for values in rows.itertuples(index=False, name=None))
    if callable(getattr(rows, "iter_rows", None)):  # polars.DataFrame
        return iter(rows.iter_rows(named=True))
    if callable(getattr(rows, "to_batches", None)):  # pyarrow.Table
        return (row for batch in rows.to_batches() for row in batch.to_pylist())
    if callable(rows) and not hasattr(rows, "__iter__"):
        rows = rows()
    try:
        return iter(rows)
    except TypeError:
        raise DataError(
            f"{label} is {_described(rows)}, which has no rows",
            "pass a list, an iterator, a function that returns one, a datasets.Dataset or a DataFrame",
        ) from None


def lines_of(rows: Any, label: str) -> Iterator[str]:
    """Yields each row as JSON; raises a DataError for the first row that is neither a text nor an object.

    Example:
        >>> list(lines_of([[{"role": "user", "content": "Hi"}]], "data"))
        ['{"messages": [{"role": "user", "content": "Hi"}]}']
    """
    first: str | None = None
    for number, row in enumerate(iterate(rows, label), 1):
        if isinstance(row, str):
            kind = "a text"
        elif isinstance(row, list | tuple) and all(isinstance(message, Mapping) for message in row):
            kind, row = "an object", {"messages": row}
        elif isinstance(row, Mapping):
            kind = "an object"
        else:
            raise DataError(f"row {number} of {label} is {_described(row)}", ROW_FORMS)
        first = first or kind
        if kind != first:
            raise DataError(
                f"row {number} of {label} is {kind}, and row 1 is {first}",
                "pass rows of one type; a text can be written as {'text': …}",
            )
        try:
            yield json.dumps(_plain(row))
        except RecursionError:
            raise DataError(
                f"row {number} of {label} is nested too deeply", "pass rows with less nesting"
            ) from None


def _described(value: Any) -> str:
    return f"{value!r:.40} ({type(value).__name__})"


def _plain(value: Any) -> Any:
    """Converts a value to plain JSON types. Other types become a marker with the type's name for error messages;
    they are no error yet, since the column may be unused."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float):
        return None if math.isnan(value) else float(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    name = type(value).__name__
    if name in _MISSING:
        return None
    if callable(getattr(value, "tolist", None)):  # arrays and their scalars
        made = value.tolist()
        return _plain(made) if type(made) is not type(value) else {UNSUPPORTED: name}
    return {UNSUPPORTED: name}


@dataclass(frozen=True)
class SpooledRows:
    """Rows that were written to a file."""

    name: str
    """The first digits of their digest, or the user's key."""
    path: Path
    reused: bool = False
    """Whether the file already existed under the user's key, so that no row was read."""


def spool_rows(
    rows: Any,
    folder: Path,
    *,
    label: str = "data",
    key: str | None = None,
    progress: Callable[[int], None] = lambda rows: None,
) -> SpooledRows:
    """Writes rows to a JSON lines file that is named by its content, or by the user's key.

    Rows that are already stored under a key are not read again.

    Example:
        >>> spool_rows(["a", "b"], Path("cache/memory")).path           # doctest: +SKIP
        PosixPath('cache/memory/4f1b….jsonl')
    """
    if key is not None and (path := spool_path(folder, key)).is_file():
        return SpooledRows(key, path, reused=True)
    digest, count = hashlib.blake2b(digest_size=16), 0
    try:
        with draft(folder, "rows") as (file, publish):
            for count, line in enumerate(lines_of(rows, label), 1):
                data = line.encode() + b"\n"
                digest.update(data)
                file.write(data)
                if count % 10_000 == 0:
                    progress(count)
            if not count:
                raise DataError(f"{label} has no rows", ROW_FORMS)
            name = key or digest.hexdigest()[:NAME_DIGITS]
            path = spool_path(folder, name)
            publish(path)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EFBIG):
            raise
        raise ResourceError(
            f"{count} rows of {label} were read, but {folder} cannot be written ({error.strerror})",
            "free some space, set data.cache_dir to another folder, or set data.streaming: true with max_steps",
        ) from error
    return SpooledRows(name, path)


def spool_path(folder: Path, name: str) -> Path:
    """The file of the rows with this name."""
    return folder / f"{name}.jsonl"


def first_difference(first: Path, second: Path) -> int | None:
    """The number of the first row in which two files of rows differ; None if they are equal."""
    with open(first, "rb") as left, open(second, "rb") as right:
        for number, (mine, theirs) in enumerate(itertools.zip_longest(left, right), 1):
            if mine != theirs:
                return number
    return None


@dataclass(frozen=True)
class PassedRows:
    """Rows from Python, as passed to a run: their name in messages, and the stream if they are not spooled."""

    label: str
    stream: RowStream | None = None


@dataclass(frozen=True, slots=True)
class _BufferedRow:
    line: str
    before: str
    """Digest of all rows before this one."""


class RowStream:
    """Rows that are read while training, from any row on.

    The last `BUFFER_BYTES` are buffered, so that an iterator, which can be read only once, can be read again from a
    little earlier. Other rows (a list, a dataset, a function that returns an iterator) are iterated again.

    Example:
        >>> stream = RowStream(iter(["a", "b", "c"]))
        >>> list(stream.values(2)), list(stream.values(1))[0]
        ([(2, 'b'), (3, 'c')], (1, 'a'))
    """

    def __init__(self, rows: Any, *, label: str = "data", key: str | None = None) -> None:
        self.label = label
        self._rows = rows
        self._is_iterator = hasattr(rows, "__next__")
        self._digests: dict[int, str] = {}
        self._count: int | None = None
        self._lock = threading.RLock()
        """Guards the state: a loader prefetches in a thread while the run reads the position."""
        self._restart()
        self.name = key or self._head()

    def _restart(self) -> None:
        self._lines = lines_of(self._rows, self.label)
        self._digest = hashlib.blake2b(digest_size=16)
        self._buffer: deque[_BufferedRow] = deque()
        self._size = 0
        self._next = 1
        """The number of the row that is read next."""
        self._ended = False

    def _head(self) -> str:
        rows = 0
        while rows < HEAD_ROWS and self._line(rows + 1) is not None:
            rows += 1
        if not rows:
            raise DataError(f"{self.label} has no rows", ROW_FORMS)
        return self.digest_before(rows + 1)[:NAME_DIGITS]

    def rename(self) -> str:
        """Renames a stream that shares its first rows with another; the name is the same in every run."""
        self.name = hashlib.blake2b(self.name.encode(), digest_size=16).hexdigest()[:NAME_DIGITS]
        return self.name

    def values(self, start: int = 1) -> Iterator[tuple[int, Any]]:
        """(row, value) from row `start` on, counted from 1."""
        for row in itertools.count(start):
            line = self._line(row)
            if line is None:
                return
            yield row, json.loads(line)

    @property
    def count(self) -> int:
        """The number of rows, once they have been read to their end."""
        assert self._count is not None, "the rows were not read to their end"
        return self._count

    def digest_before(self, row: int) -> str:
        """Digest of the rows before this one; reads up to it if they were not read yet."""
        if row == 1:
            return _EMPTY_DIGEST
        with self._lock:
            if row not in self._digests:
                if self._line(row - 1) is None:
                    raise DataError(
                        f"{self.label} ends before row {row}, at which the run stopped", _SAME_ROWS
                    )
                at = row - (self._next - len(self._buffer))
                self._digests[row] = self._buffer[at].before if row < self._next else self._digest.hexdigest()
            return self._digests[row]

    def check(self, row: int, digest: str) -> None:
        """Raises a DataError unless the rows before this one have this digest."""
        if self.digest_before(row) != digest:
            raise DataError(
                f"{self.label}: the rows before row {row} are not those that the run was trained on",
                _SAME_ROWS,
            )

    def _line(self, row: int) -> str | None:
        """One row as JSON; None after the last."""
        with self._lock:
            if row < self._next - len(self._buffer):
                if self._is_iterator:
                    raise DataError(
                        f"{self.label} is an iterator, and its row {row} cannot be read a second time",
                        "pass a list, a dataset, or a function that returns a new iterator; or lower max_steps",
                    )
                self._restart()
            while row >= self._next and not self._ended:
                self._read_row()
            return self._buffer[row - (self._next - len(self._buffer))].line if row < self._next else None

    def _read_row(self) -> None:
        line = next(self._lines, None)
        if line is None:
            self._ended, self._count = True, self._next - 1
            return
        self._buffer.append(_BufferedRow(line, self._digest.hexdigest()))
        self._digest.update(line.encode() + b"\n")
        self._next += 1
        self._size += len(line)
        while self._size > BUFFER_BYTES and len(self._buffer) > HEAD_ROWS:
            self._size -= len(self._buffer.popleft().line)
