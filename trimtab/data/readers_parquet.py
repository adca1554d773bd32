"""Reads Parquet: the text column or the rows of a file, a few rows in memory at a time."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from typing import Any

from trimtab.data.formats import choose_text_column
from trimtab.data.readers_text import Meter, Row
from trimtab.data.signatures import recognize
from trimtab.data.sources import SourceFile
from trimtab.facts.errors import DataError, MissingDependency

_ROLE_KEYS = {"content": "role", "value": "from"}
"""Maps the key of a message's content, which may be null, to the key of its role."""


def read_parquet(file: SourceFile, column: str | None, start: int, meter: Meter | None) -> Iterator[Row]:
    """The texts of a Parquet file's text column."""
    name = parquet_text_column(file, parquet_schema(file), column)
    return ((row, value[name] or "", True) for row, value in parquet_values(file, [name], start, meter))


def parquet_text_column(file: SourceFile, schema: Any, column: str | None) -> str:
    """Returns the text column: `column` if given, otherwise detected from the schema."""
    import pyarrow.types as types

    def is_text(kind: Any) -> bool:
        inner = kind.value_type if types.is_dictionary(kind) else kind
        return types.is_string(inner) or types.is_large_string(inner) or types.is_string_view(inner)

    texts = [field.name for field in schema if is_text(field.type)]
    if column is None:
        return choose_text_column(file, texts, [name for name in schema.names if name not in texts])
    if column not in texts:
        problem = (
            f"contains {schema.field(column).type}, not text" if column in schema.names else "does not exist"
        )
        raise DataError(
            f"column {column!r} of {file.label} {problem}",
            f"set text_column to one of {', '.join(texts)}" if texts else "write a column of strings",
        )
    return column


def parquet_rows(
    file: SourceFile,
    start: int,
    meter: Meter | None,
    columns: Collection[str] | None,
    turns: Collection[str],
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (row, JSON value by column) of the requested columns; see `readers.read_values`."""
    wanted = [name for name in parquet_schema(file).names if columns is None or name in columns]
    return (
        (row, {name: (_turns if name in turns else _without_none)(inner) for name, inner in value.items()})
        for row, value in parquet_values(file, wanted, start, meter)
    )


def _without_none(value: Any) -> Any:
    """Removes the null keys that Parquet adds: all rows of a Parquet column have the same keys."""
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value


def _turns(value: Any) -> Any:
    """Removes null keys from a list of messages, except a message's content."""
    return [_turn(inner) for inner in value] if isinstance(value, list) else _without_none(value)


def _turn(message: Any) -> Any:
    cleaned = _without_none(message)
    if isinstance(cleaned, dict):
        cleaned |= {
            what: None for what, who in _ROLE_KEYS.items() if who in cleaned and message.get(what, "") is None
        }
    return cleaned


def parquet_values(
    file: SourceFile, columns: list[str], start: int, meter: Meter | None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields (row, value by column) of a Parquet file; does not read row groups before `start`."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as missing:
        raise MissingDependency("reading Parquet needs pyarrow", "pip install 'trimtab[train]'") from missing
    broken = (pyarrow.ArrowInvalid, pyarrow.ArrowException, OSError)
    try:
        with parquet.ParquetFile(file.path) as table:
            total, row, group = max(table.metadata.num_rows, 1), 0, 0
            while group < table.num_row_groups and row + table.metadata.row_group(group).num_rows < start:
                row += table.metadata.row_group(group).num_rows
                group += 1
            groups = list(range(group, table.num_row_groups))
            # 64 rows: documents of a megabyte each still fit in memory easily.
            for batch in table.iter_batches(batch_size=64, row_groups=groups, columns=columns):
                try:
                    values = batch.to_pylist()
                except UnicodeDecodeError as error:
                    raise DataError(
                        f"{file.label} is not UTF-8 in one of the 64 rows from row {row + 1} on",
                        "repair or remove the row",
                    ) from error
                yield from itertools.islice(
                    enumerate(values, row + 1), max(0, min(start - row - 1, len(values))), None
                )
                row += len(values)
                if meter is not None:
                    meter.done = row / total
    except broken as error:
        raise _not_parquet(file, error) from error


def parquet_schema(file: SourceFile) -> Any:
    """The Arrow schema of a Parquet file."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as missing:
        raise MissingDependency("reading Parquet needs pyarrow", "pip install 'trimtab[train]'") from missing
    try:
        return parquet.read_schema(file.path)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowException, OSError) as error:
        raise _not_parquet(file, error) from error


def _not_parquet(file: SourceFile, error: Exception) -> DataError:
    reason = str(error).splitlines()[0]
    try:
        with open(file.path, "rb") as raw:
            head = raw.read(8192)
    except OSError:
        head = b""
    known = recognize(head, file.path.name)
    if known is not None and not head.startswith(b"PAR1"):
        return DataError(f"{file.label} is {known[0]}, not Parquet", known[1])
    return DataError(f"{file.label} is not a complete Parquet file ({reason})", "fetch the file again")
