"""Row formats: the text column of a table, and the parts of an example and their columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimtab.data.sources import SourceFile
from trimtab.data.spec import TEXT_COLUMNS
from trimtab.facts.errors import DataError

PARTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "messages": (("messages",), ("system", "tools")),
    "sharegpt": (("conversations",), ("system", "tools")),
    "prompt-completion": (("prompt", "completion"), ("system", "tools")),
    "alpaca": (("instruction", "output"), ("input", "system", "tools")),
}
"""Required and optional parts of each format, in the order of detection; by default a part is in the column of the
same name."""
TURNS = ("messages", "conversations")
"""Parts that are lists of messages."""
UNSUPPORTED = "__not_json__"
"""The key that marks a value from Python that JSON cannot represent; its value is the type's name."""


@dataclass(frozen=True)
class Format:
    """How the rows of one source are read: the format's name, and the column of each part."""

    name: str
    columns: Mapping[str, str]

    @property
    def needed(self) -> list[str]:
        """The columns that every row must have."""
        return [self.columns.get(part, part) for part in PARTS[self.name][0]]

    @property
    def used(self) -> frozenset[str]:
        """The columns that are read."""
        return frozenset(self.columns.get(part, part) for part in parts_of(self.name))

    def get(self, value: Mapping[str, Any], part: str) -> Any:
        """Returns a part of a row, or None."""
        return value.get(self.columns.get(part, part))


def parts_of(name: str) -> tuple[str, ...]:
    """The parts that a row of a format must have, then those it may have."""
    return (*PARTS[name][0], *PARTS[name][1])


def known_formats() -> str:
    """The formats and their required columns, for messages."""
    return "; ".join(f"{name}: {', '.join(needed)}" for name, (needed, _) in PARTS.items())


def choose_text_column(file: SourceFile, texts: list[str], others: list[str]) -> str:
    """Chooses the text column: a common name, else the only column that contains text.

    Example:
        >>> choose_text_column(SourceFile(None, "a.csv", "csv"), ["title", "body"], ["year"])   # type: ignore
        'body'
    """
    lowered = {name.lower(): name for name in reversed(texts)}
    for usual in TEXT_COLUMNS:
        if usual in lowered:
            return lowered[usual]
    if len(texts) == 1:
        return texts[0]
    listed = ", ".join([*texts, *(f"{name} (not text)" for name in others)]) or "none"
    raise DataError(
        f"{file.label} has no obvious text column; its columns: {listed}",
        f"set text_column, or format and columns for examples ({known_formats()})",
    )


def detect_text_column(file: SourceFile, value: Any) -> str:
    """Chooses the text column of JSON objects from the first row."""
    if not isinstance(value, dict):
        raise DataError(
            f"{file.label} contains {type_name(value)}, not objects",
            'write one {"text": …} object per row',
        )
    # A null in the first row does not show the type of a column, but a common name does.
    texts = [
        name
        for name, field in value.items()
        if isinstance(field, str) or (field is None and name.lower() in TEXT_COLUMNS)
    ]
    return choose_text_column(file, texts, [name for name in value if name not in texts])


def text_of(file: SourceFile, row: int, value: Any, column: str | None) -> str:
    """Returns the text of one JSON row; null counts as empty."""
    if isinstance(value, str):
        return value
    if not isinstance(value, dict) or column not in value:
        keys = ", ".join(value) if isinstance(value, dict) else type_name(value)
        raise DataError(
            f"{file.label}:{row} has no column {column!r} (it has {keys})",
            "set text_column to a column that every row has, or complete the row",
        )
    text = value[column]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise DataError(
            f"column {column!r} of {file.label}:{row} contains {type_name(text)}, not text",
            "set text_column to a column of strings, or write each row as one string",
        )
    return text


def type_name(value: Any) -> str:
    """The type of a JSON value, for messages.

    Example:
        >>> type_name([1]), type_name(2.5)
        ('a list', 'a number')
    """
    if isinstance(value, list):
        return "a list"
    if isinstance(value, dict):
        return f"a {value[UNSUPPORTED]}" if set(value) == {UNSUPPORTED} else "an object"
    if isinstance(value, bool):
        return "a boolean"
    return "null" if value is None else "a number" if isinstance(value, int | float) else "a string"
