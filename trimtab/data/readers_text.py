"""Reads text, JSON Lines and JSON: bytes → (row, text, last) with bounded memory and exact error locations.

Every reader yields `(row, text, last)`: rows count from 1, and a document may come in several blocks, the last of
which has `last=True`, so that a large text file is never in memory as a whole.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import os
import shlex
import zlib
from collections.abc import Iterator
from typing import IO, Any, cast

from trimtab.data.formats import detect_text_column, text_of
from trimtab.data.signatures import recognize
from trimtab.data.sources import SourceFile
from trimtab.data.spec import DocumentMode
from trimtab.facts.errors import DataError, MissingDependency

Row = tuple[int, str, bool]
BLOCK = 1 << 18


class Meter:
    """Tracks how much of the current file has been read, for a progress bar."""

    def __init__(self) -> None:
        self.done = 0.0
        self._raw: IO[bytes] | None = None
        self._size = 1

    def watch(self, raw: IO[bytes], size: int) -> None:
        """Tracks the position in the file on disk, which is also correct for compressed files."""
        self._raw, self._size = raw, max(size, 1)

    @property
    def share(self) -> float:
        """The share that has been read, between 0 and 1."""
        if self._raw is not None and not self._raw.closed:
            self.done = min(1.0, self._raw.tell() / self._size)
        return self.done


def unreadable(file: SourceFile, error: OSError) -> DataError:
    """The error for a file that became unreadable after the source was opened."""
    return DataError(
        f"{file.label} can no longer be read: {error.strerror or error}",
        "restore it or check its permissions",
    )


def open_bytes(file: SourceFile, meter: Meter | None = None) -> IO[bytes]:
    """The file's bytes, decompressed."""
    try:
        raw = open(file.path, "rb")  # noqa: SIM115  the returned stream owns it
    except OSError as error:
        raise unreadable(file, error) from error
    if meter is not None:
        meter.watch(raw, os.fstat(raw.fileno()).st_size)
    if file.compression == "gzip":
        return cast(IO[bytes], gzip.open(raw, "rb"))
    if file.compression == "zstd":
        return io.BufferedReader(_zstd(raw))
    return raw


def _zstd(raw: IO[bytes]) -> Any:
    try:
        import pyarrow
    except ImportError as missing:
        raise MissingDependency(
            "reading .zst files needs pyarrow", "pip install 'trimtab[train]'"
        ) from missing
    return pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd")


def blocks(file: SourceFile, meter: Meter | None = None) -> Iterator[bytes]:
    """The file's bytes in blocks; a damaged archive raises a DataError for the user."""
    with open_bytes(file, meter) as stream:
        while True:
            try:
                block = stream.read(BLOCK)
            except (EOFError, zlib.error, OSError) as error:
                raise _broken(file, error) from error
            if not block:
                return
            yield block


def _broken(file: SourceFile, error: Exception) -> DataError:
    return DataError(f"{file.label} cannot be read ({error})", "fetch the file again")


def decoded(file: SourceFile, meter: Meter | None = None) -> Iterator[str]:
    """Yields the file's text in blocks, line ends as \\n; raises DataError for binary and non-UTF-8 files."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")("strict")
    newlines = io.IncrementalNewlineDecoder(None, translate=True)
    offset = 0
    for block in blocks(file, meter):
        if offset == 0:
            _refuse_binary(file, block)
        pending = len(decoder.getstate()[0])
        try:
            text = decoder.decode(block)
        except UnicodeDecodeError as error:
            raise not_utf8(file, offset - pending + error.start) from error
        offset += len(block)
        if text:
            yield newlines.decode(text)
    try:
        tail = decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise not_utf8(file, offset - len(error.object) + error.start) from error
    yield newlines.decode(tail, final=True)


def _head(file: SourceFile) -> bytes:
    with open_bytes(file) as stream:
        try:
            return stream.read(8192)
        except (EOFError, zlib.error, OSError) as error:
            raise _broken(file, error) from error


def _refuse_binary(file: SourceFile, head: bytes) -> None:
    known = None if file.accepted else recognize(head[:8192], file.path.name)
    if known is not None:
        raise DataError(f"{file.label} is {known[0]}, not text", known[1])
    if head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        raise DataError(f"{file.label} is UTF-16", f"convert it: {_iconv('UTF-16', file)}")
    if b"\0" in head[:8192]:
        raise DataError(
            f"{file.label} is a binary file, not text", "remove it from the source or convert it to text"
        )


def _iconv(encoding: str, file: SourceFile) -> str:
    """The command that writes a UTF-8 copy next to a file."""
    copy = file.path.with_name(f"utf8-{file.path.name}")
    return f"iconv -f {encoding} -t UTF-8 {shlex.quote(str(file.path))} > {shlex.quote(str(copy))}, and name the copy"


def not_utf8(file: SourceFile, offset: int) -> DataError:
    """The error for an invalid byte."""
    return DataError(
        f"{file.label} is not UTF-8 at byte {offset}",
        f"convert it, for instance: {_iconv('LATIN1', file)}",
    )


def read_text(file: SourceFile, mode: DocumentMode, start: int, meter: Meter | None) -> Iterator[Row]:
    """A text file as one document, one document per line, or one per paragraph."""
    if mode == "file":
        if start > 1:
            return
        for text in decoded(file, meter):
            yield 1, text, False
        yield 1, "", True
        return
    for row, text in enumerate(lines_of(file, meter) if mode == "lines" else _paragraphs(file, meter), 1):
        if row >= start:
            yield row, text, True


def lines_of(file: SourceFile, meter: Meter | None) -> Iterator[str]:
    """Yields lines without line ends; a line that spans several blocks is joined once, at its end."""
    parts: list[str] = []
    for block in decoded(file, meter):
        head, *rest = block.split("\n")
        parts.append(head)
        for line in rest:
            yield "".join(parts)
            parts = [line]
    if any(parts):
        yield "".join(parts)


def _paragraphs(file: SourceFile, meter: Meter | None) -> Iterator[str]:
    paragraph: list[str] = []
    for line in lines_of(file, meter):
        if line.strip():
            paragraph.append(line)
        elif paragraph:
            yield "\n".join(paragraph)
            paragraph = []
    if paragraph:
        yield "\n".join(paragraph)


def read_jsonl(file: SourceFile, column: str | None, start: int, meter: Meter | None) -> Iterator[Row]:
    """One JSON value per line: an object with a text column, or a string."""
    return read_rows(file, jsonl_values(file, start, meter), column)


def jsonl_values(file: SourceFile, start: int, meter: Meter | None) -> Iterator[tuple[int, Any]]:
    """Yields (row, JSON value), one per line. Blank lines are skipped."""
    _refuse_binary(file, _head(file))
    offset = 0
    with open_bytes(file, meter) as stream:
        row = 0
        while True:
            try:
                line = stream.readline()
            except (EOFError, zlib.error, OSError) as error:
                raise _broken(file, error) from error
            if not line:
                return
            row += 1
            if row == 1 and line.startswith(codecs.BOM_UTF8):
                line, offset = line[3:], 3
            if row >= start and line.strip():
                try:
                    value = json.loads(line.decode("utf-8"))
                except UnicodeDecodeError as error:
                    raise not_utf8(file, offset + error.start) from error
                except (
                    ValueError,
                    RecursionError,
                ) as error:  # invalid JSON, or numbers with thousands of digits
                    raise DataError(
                        f"{file.label}:{row} is not JSON ({error})", "write one JSON object per line"
                    ) from error
                yield row, value
            offset += len(line)


def read_rows(file: SourceFile, values: Iterator[tuple[int, Any]], column: str | None) -> Iterator[Row]:
    """Yields the texts of JSON values; the text column is detected from the first value unless it is given."""
    for row, value in values:
        column = column if column or isinstance(value, str) else detect_text_column(file, value)
        yield row, text_of(file, row, value, column), True


def read_json(file: SourceFile, column: str | None, start: int, meter: Meter | None) -> Iterator[Row]:
    """Reads a JSON array of objects or strings element by element, or JSON Lines in a .json file."""
    return read_rows(file, json_values(file, start, meter), column)


def json_values(file: SourceFile, start: int, meter: Meter | None) -> Iterator[tuple[int, Any]]:
    """Yields (row, element) of a JSON array, or (row, value) of JSON Lines."""
    head = next(decoded(file), "").lstrip()
    if not head.startswith("["):
        yield from jsonl_values(file, start, meter)
        return
    yield from ((row, value) for row, value in enumerate(_elements(file, meter), 1) if row >= start)


def _elements(file: SourceFile, meter: Meter | None) -> Iterator[Any]:
    """Yields the elements of an array, one in memory at a time; the buffer doubles until an element fits."""
    stream, decoder = decoded(file, meter), json.JSONDecoder()
    buffer, at, count, want = next(stream, "").lstrip()[1:], 0, 0, BLOCK
    ended = False
    while True:
        while at < len(buffer) and buffer[at] in " \t\r\n,":
            at += 1
        complete = False
        if at < len(buffer):
            if buffer[at] == "]":
                if buffer[at + 1 :].strip() or any(block.strip() for block in stream):
                    raise DataError(
                        f"{file.label} has content after its JSON array", "put all elements into one array"
                    )
                return
            try:
                value, end = decoder.raw_decode(buffer, at)
                # A number that ends at the buffer's end may continue in the next block.
                complete = end < len(buffer) or ended
            except json.JSONDecodeError as error:
                if ended:
                    raise DataError(
                        f"{file.label} is not JSON at element {count + 1} ({error.msg})",
                        "repair the element, or fetch the file again",
                    ) from error
            except (ValueError, RecursionError) as error:
                raise DataError(
                    f"{file.label} cannot be read at element {count + 1} ({error})",
                    "repair or remove the element",
                ) from error
        elif ended:
            raise DataError(f"{file.label} ends inside its JSON array", "fetch the file again")
        if complete:
            yield value
            at, count, want = end, count + 1, BLOCK
            continue
        parts, num_read = [buffer[at:]], 0
        while num_read < want:
            block = next(stream, None)
            if block is None:
                ended = True
                break
            parts.append(block)
            num_read += len(block)
        buffer, at, want = "".join(parts), 0, want * 2
