"""Reads sources: documents and rows of every kind of file, split into segments for the tokenizer."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from trimtab.data.examples import TrainingExample, example_of
from trimtab.data.formats import detect_text_column
from trimtab.data.readers_csv import csv_rows, csv_values, read_csv, text_column
from trimtab.data.readers_parquet import parquet_rows, parquet_schema, parquet_text_column, read_parquet
from trimtab.data.readers_text import (
    Meter,
    Row,
    json_values,
    jsonl_values,
    read_json,
    read_jsonl,
    read_rows,
    read_text,
    unreadable,
)
from trimtab.data.sources import ROWS, TABLES, ResolvedSource, SourceFile, SourceSpec
from trimtab.data.spec import SEGMENT_CHARS, UNKNOWN_SIZE
from trimtab.facts.errors import DataError
from trimtab.text.surrogates import replace_surrogates

# Where byte-level and SentencePiece tokenizers always start a new word, best first.
_SPLIT_PATTERNS = (
    re.compile(r"(?<=\S)(?= [A-Za-z])"),
    re.compile(r"(?<=\S\n)(?=\S)"),
    re.compile(r"(?<=\S)(?= \S)"),
)


@dataclass(slots=True)
class Segment:
    """A segment of one document; most documents are a single segment (`first` and `last`)."""

    file: int
    row: int
    text: str
    first: bool
    last: bool
    repaired: bool = False
    example: TrainingExample | None = None
    """The training example, instead of a text."""
    rewritten: bool = False
    """Set by rendering: whether the template renders earlier turns differently once an answer follows."""
    row_error: str | None = None
    """Why the row cannot be used, if such rows are skipped."""

    @property
    def size(self) -> int:
        """The approximate number of characters."""
        return len(self.text) if self.example is None else self.example.size


def read(file: SourceFile, spec: SourceSpec, *, start: int = 1, meter: Meter | None = None) -> Iterator[Row]:
    """Yields (row, text, last) of one file from row `start` on; rows count from 1."""
    if file.kind == "text":
        return read_text(file, spec.documents, start, meter)
    if file.kind == "jsonl":
        return read_jsonl(file, spec.text_column, start, meter)
    if file.kind == "json":
        return read_json(file, spec.text_column, start, meter)
    if file.kind == "csv":
        return read_csv(file, spec.text_column, start, meter)
    if file.kind == ROWS:
        assert file.rows is not None
        return read_rows(file, file.rows.values(start), spec.text_column)
    assert file.kind == "parquet", file.kind
    return read_parquet(file, spec.text_column, start, meter)


def read_values(
    file: SourceFile,
    *,
    start: int = 1,
    meter: Meter | None = None,
    columns: Collection[str] | None = None,
    turns: Collection[str] = (),
) -> Iterator[tuple[int, Any]]:
    """Yields (row, value) of a table from row `start` on; a value is a JSON value, usually a dict by column.

    `columns` are the columns to read (Parquet reads no others). `turns` are the columns that may be lists of messages,
    whose null contents are preserved.
    """
    if file.kind == "jsonl":
        return jsonl_values(file, start, meter)
    if file.kind == "json":
        return json_values(file, start, meter)
    if file.kind == "csv":
        return csv_rows(file, start, meter)
    if file.kind == ROWS:
        assert file.rows is not None
        return file.rows.values(start)
    assert file.kind == "parquet", file.kind
    return parquet_rows(file, start, meter, columns, turns)


def text_column_of(file: SourceFile, spec: SourceSpec) -> str | None:
    """Returns the text column of a table; None for text files and for rows that are strings."""
    if file.kind == "csv":
        _, header = next(csv_values(file, 1, None), (0, []))
        return text_column(file, header, spec.text_column)
    if file.kind == "parquet":
        return parquet_text_column(file, parquet_schema(file), spec.text_column)
    if file.kind not in TABLES:
        return None
    _, value = next(read_values(file), (0, ""))
    return None if isinstance(value, str) else spec.text_column or detect_text_column(file, value)


def split_segments(rows: Iterator[Row], file: int) -> Iterator[Segment]:
    """Splits documents into segments of at most SEGMENT_CHARS, if possible where a tokenizer splits too.

    The split points depend on the text alone, not on how its bytes arrived.
    """
    carry, first, repaired = "", True, False
    for row, text, last in rows:
        valid = replace_surrogates(text)
        repaired = repaired or valid is not text
        buffer, at = carry + valid if carry else valid, 0
        while len(buffer) - at > SEGMENT_CHARS:
            end = _split_point(buffer, at)
            yield Segment(file, row, buffer[at:end], first, False, repaired)
            at, first = end, False
        carry = buffer[at:]
        if last:
            yield Segment(file, row, carry, first, True, repaired)
            carry, first, repaired = "", True, False


def _split_point(text: str, at: int) -> int:
    """The split point: the last match of the best pattern in the last eighth of the segment, else its end."""
    low, high = at + SEGMENT_CHARS * 7 // 8, at + SEGMENT_CHARS
    for pattern in _SPLIT_PATTERNS:
        ends = [match.start() for match in pattern.finditer(text, low, high)]
        if ends:
            return ends[-1]
    return high


def _size(file: SourceFile) -> int:
    if file.kind == ROWS:
        return UNKNOWN_SIZE
    try:
        return file.path.stat().st_size
    except OSError as error:
        raise unreadable(file, error) from error


class SegmentReader:
    """Reads all documents of a source in order, from any (file, row) on, and tracks the progress in bytes.

    Example:
        >>> reader = SegmentReader(resolve(SourceSpec("books/")))            # doctest: +SKIP
        >>> next(iter(reader)).text[:20]                                     # doctest: +SKIP
    """

    def __init__(
        self,
        source: ResolvedSource,
        *,
        file: int = 0,
        row: int = 1,
        taken: int = 0,
        template: bool = False,
    ) -> None:
        self.source = source
        self._template = template
        self._start = (file, row)
        self.taken = taken
        """Documents begun so far, those before the start included; `first` counts them."""
        self._sizes = [_size(f) for f in source.files]
        self._before = 0
        self._size = 0
        self._meter = Meter()

    @property
    def total_bytes(self) -> int:
        """The size of all files."""
        return sum(self._sizes)

    @property
    def done_bytes(self) -> int:
        """Bytes read so far, of `total_bytes`."""
        return self._before + int(self._meter.share * self._size)

    def __iter__(self) -> Iterator[Segment]:
        start_file, start_row = self._start
        limit = self.source.spec.first
        for index, file in enumerate(self.source.files):
            self._meter = Meter()
            self._before, self._size = self._before + self._size, self._sizes[index]
            if index < start_file:
                continue
            for segment in self._segments(index, file, start_row if index == start_file else 1):
                if segment.first:
                    if limit is not None and self.taken >= limit:
                        return
                    self.taken += 1
                yield segment

    def _segments(self, index: int, file: SourceFile, start: int) -> Iterator[Segment]:
        spec, form = self.source.spec, self.source.form
        if form is None or file.kind not in TABLES:
            yield from split_segments(read(file, spec, start=start, meter=self._meter), index)
            return
        for row, value in read_values(
            file, start=start, meter=self._meter, columns=form.used, turns=form.needed
        ):
            example, row_error = None, None
            try:
                example = example_of(
                    f"{file.label}:{row}",
                    value,
                    form,
                    template=self._template,
                    keep_end=spec.train_on == "all",
                )
            except DataError as error:
                if spec.bad_rows != "skip":
                    raise
                row_error = error.cause
            repaired = example is not None and example.repaired
            yield Segment(index, row, "", True, True, repaired, example, row_error=row_error)
