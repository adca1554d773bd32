"""Reads CSV: detects the delimiter, checks the header, yields the rows."""

from __future__ import annotations

import csv
import io
import itertools
import re
import sys
from collections.abc import Iterator

from trimtab.data.formats import detect_text_column
from trimtab.data.readers_text import Meter, Row, decoded, lines_of
from trimtab.data.sources import SourceFile
from trimtab.data.spec import TEXT_COLUMNS
from trimtab.facts.errors import DataError
from trimtab.facts.names import shortened

DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
"""The supported delimiters, the default first, and their names in messages."""
_SAMPLE_ROWS = 20
"""Rows that are read to detect the delimiter."""
_NUMBER = re.compile(r"[-+]?\d+([.,:/-]\d+)*%?")
_LONG_NAME = 80


def usual_delimiter(file: SourceFile) -> str:
    """The delimiter that a file's extension implies: tabs for .tsv, commas for everything else."""
    return "\t" if ".tsv" in [suffix.lower() for suffix in file.path.suffixes] else ","


def delimiter_of(file: SourceFile) -> str:
    """Detects a file's delimiter: commas, unless only another delimiter results in several columns.

    The header must have several names, and the rows below it the same number of fields. A .tsv file always has tabs.
    """
    if file.delimiter is not None:
        return file.delimiter
    if usual_delimiter(file) == "\t":
        return "\t"
    head = next(decoded(file), "")
    samples = {delimiter: _sample(head, delimiter) for delimiter in DELIMITERS}
    usual = samples[","]
    if len(usual) > 1 and len(usual[0]) > 1 and _is_rectangular(usual):
        return ","
    others = {d: rows for d, rows in samples.items() if d != "," and len(rows) > 1 and len(rows[0]) > 1}
    even = next((delimiter for delimiter, rows in others.items() if _is_rectangular(rows)), None)
    if even is not None:
        return even
    if file.accepted:
        return ","
    for delimiter, rows in others.items():
        wide = sum(len(fields) >= len(rows[0]) for fields in rows[1:])
        if usual and len(usual[0]) == 1 and 2 * wide >= len(rows) - 1 and not _is_data(rows[0]):
            what = DELIMITERS[delimiter]
            raise DataError(
                f"{file.label} has {what} between its column names, but rows with different numbers of fields",
                f"put texts that contain {what} in double quotes",
            )
    return ","


def _sample(head: str, delimiter: str) -> list[list[str]]:
    """The first rows of a text, without a last row that may be incomplete."""
    rows: list[list[str]] = []
    try:
        for fields in csv.reader(io.StringIO(head), delimiter=delimiter):
            if fields:
                rows.append(fields)
            if len(rows) > _SAMPLE_ROWS:
                break
    except csv.Error:
        return []
    return rows if len(rows) > _SAMPLE_ROWS or head.endswith("\n") or len(rows) < 3 else rows[:-1]


def _is_rectangular(rows: list[list[str]]) -> bool:
    """Whether all rows have as many fields as the first; trailing empty fields, as in spreadsheets, do not count."""
    wanted = len(rows[0])
    return all(
        len(fields) >= wanted and not any(field.strip() for field in fields[wanted:]) for fields in rows
    )


def read_csv(file: SourceFile, column: str | None, start: int, meter: Meter | None) -> Iterator[Row]:
    """The texts of a CSV file's text column."""
    values = csv_values(file, start, meter)
    _, header = next(values, (0, []))
    first = next(values, None)
    if first is None:
        if start == 1 and header and column is None:
            refuse_data_as_header(file, header)
        return  # a header alone
    column = text_column(file, header, column)
    index = header.index(column)
    for row, fields in itertools.chain([first], values):
        yield row, checked_field(file, row, fields, index, len(header)), True


def text_column(file: SourceFile, header: list[str], column: str | None) -> str:
    """Returns the text column: `column` if given, otherwise detected from the header."""
    if column is None:
        refuse_data_as_header(file, header)
        column = detect_text_column(file, dict.fromkeys(header, ""))
    if column not in header:
        raise DataError(
            f"{file.label} has no column {column!r}", f"set text_column to one of {', '.join(header)}"
        )
    return column


def refuse_data_as_header(file: SourceFile, header: list[str]) -> None:
    """Raises a DataError if a new run's file begins with a row of data, which would be lost as a header."""
    if file.accepted or any(name.strip().lower() in TEXT_COLUMNS for name in header) or not _is_data(header):
        return
    names = ["text"] if len(header) == 1 else [f"column{i}" for i in range(1, len(header))] + ["text"]
    raise DataError(
        f"the first line of {file.label} looks like data, not like column names "
        f"('{shortened(', '.join(header))}')",
        f"add a header line, such as `{','.join(names)}`; if these are the column names, set text_column",
    )


def _is_data(fields: list[str]) -> bool:
    """Whether a row cannot be column names: one field is a number, a sentence, or very long.

    A single column name seldom has five words or more; the first line of a file with one text per line often does.
    """
    if len(fields) == 1 and len(fields[0].split()) >= 5:
        return True
    return any(
        "\n" in field
        or len(field) > _LONG_NAME
        or _NUMBER.fullmatch(field.strip()) is not None
        or (field.rstrip().endswith((".", "!", "?", "…")) and len(field.split()) > 2)
        for field in fields
    )


def csv_values(file: SourceFile, start: int, meter: Meter | None) -> Iterator[tuple[int, list[str]]]:
    """Yields (0, column names), then (row, fields); skips empty lines and raises for rows with too many fields."""
    csv.field_size_limit(min(sys.maxsize, 2**31 - 1))
    delimiter = delimiter_of(file)
    reader = csv.reader((line + "\n" for line in lines_of(file, meter)), delimiter=delimiter, strict=True)
    row, wanted, line = 0, 0, 1
    try:
        for row, fields in enumerate(reader):
            if row == 0:
                wanted = len(fields)
                _refuse_duplicates(file, fields)
                yield row, fields
            elif row >= start and fields:
                if 0 < wanted < len(fields) and any(field.strip() for field in fields[wanted:]):
                    raise _too_many_fields(file, row, line, len(fields), wanted, DELIMITERS[delimiter])
                yield row, fields
            line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{file.label} is not CSV at line {line} ({error})",
            "put texts that contain quotes in double quotes and double the inner quotes",
        ) from error


def _refuse_duplicates(file: SourceFile, header: list[str]) -> None:
    duplicates = sorted({name for name in header if name and header.count(name) > 1})
    if duplicates and _is_data(header):
        refuse_data_as_header(file, header)
    if duplicates:
        raise DataError(
            f"{file.label} has several columns named {duplicates[0]!r}", "give each a different name"
        )


def _too_many_fields(
    file: SourceFile, row: int, line: int, found: int, wanted: int, between: str
) -> DataError:
    """The error for a row with too many fields, usually a text that was split."""
    return DataError(
        f"row {row} of {file.label} (line {line}) has {found} fields, not {wanted}",
        f"put texts that contain {between} in double quotes",
    )


def checked_field(file: SourceFile, row: int, fields: list[str], index: int, wanted: int) -> str:
    """Returns one field of a row; raises a DataError if the row is too short."""
    if len(fields) <= index:
        raise DataError(
            f"row {row} of {file.label} has {len(fields)} fields, not {wanted}",
            "give the row a field for each column",
        )
    return fields[index]


def csv_rows(file: SourceFile, start: int, meter: Meter | None) -> Iterator[tuple[int, dict[str, str]]]:
    """Yields (row, fields by column) of a CSV file."""
    values = csv_values(file, start, meter)
    _, header = next(values, (0, []))
    for row, fields in values:
        yield row, {n: checked_field(file, row, fields, i, len(header)) for i, n in enumerate(header)}
