"""How a source begins, in a line: what is read as text, and the first words of it."""

from __future__ import annotations

import itertools

from trimtab.data.examples import Example
from trimtab.data.readers import SegmentReader, text_column_of
from trimtab.data.readers_csv import DELIMITERS, delimiter_of, usual_delimiter
from trimtab.data.sources import TABLES, ResolvedSource
from trimtab.facts.names import shortened

SHOWN = 70
"""Characters of the first document that are shown."""
_LOOKED_AT = 100


def beginning(source: ResolvedSource, *, template: bool = False) -> str:
    """What a source was taken for and how its first document begins, printable, on one line.

    Args:
        source: the files, with the format that was found.
        template: whether there is a chat template.

    Example:
        >>> beginning(resolve(SourceSpec("rows.csv")))                        # doctest: +SKIP
        "text column 'body', separated by semicolons; first document: 'Once upon a time …'"
    """
    segments = itertools.islice(SegmentReader(source, template=template), _LOOKED_AT)
    shown = next((segment for segment in segments if segment.text.strip() or segment.example), None)
    file = source.files[shown.file if shown is not None else 0]
    said = []
    if source.form is not None:
        said.append(f"format {source.form.name}")
    elif file.kind in TABLES:
        column = text_column_of(file, source.spec)
        said.append("rows of strings" if column is None else f"text column '{shortened(column)}'")
    if file.kind == "csv" and delimiter_of(file) != usual_delimiter(file):
        said.append(f"separated by {DELIMITERS[delimiter_of(file)]}")
    if len(source.files) > 1:
        said.append(f"{len(source.files):,} files")
    if source.ignored:
        some = ", ".join(shortened(name, 40) for name in source.ignored[:3])
        more = f" and {len(source.ignored) - 3:,} more" if len(source.ignored) > 3 else ""
        said.append(f"left out as no text: {some}{more}")
    what = "first document" if source.form is None else "first example"
    words = "" if shown is None else _words(shown.example) if shown.example else shown.text
    first = f"{what}: '{shortened(words, SHOWN)}'"
    return f"{', '.join(said)}; {first}" if said else first


def _words(example: Example) -> str:
    if example.conversation is None:
        return " ".join(text for text, _ in example.parts)
    return " ".join(
        f"{message['role']}: {message.get('content')}" for message in example.conversation.messages
    )
