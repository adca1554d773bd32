"""Data sources: from what the user names (a file, a folder, a glob) to a stable, ordered list of files."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.data.drafts import draft
from trimtab.data.spec import (
    BAD_ROWS,
    DOCUMENT_MODES,
    FORMATS,
    TRAIN_ON,
    BadRows,
    DocumentMode,
    FormatName,
    TrainOn,
)
from trimtab.facts.errors import DataError
from trimtab.facts.names import path_of

if TYPE_CHECKING:
    from trimtab.data.formats import Format
    from trimtab.data.in_memory import RowStream

KINDS = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".markdown": "text",
    ".rst": "text",
    ".tex": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
ROWS = "rows"
"""The kind of a source that is not a file: rows passed from Python (`in_memory.RowStream`)."""
TABLES = ("jsonl", "json", "csv", "parquet", ROWS)


@dataclass(frozen=True)
class SourceSpec:
    """One source of documents, as a recipe names it.

    `source` is a local file, folder or glob; with `files` (a hub dataset, already downloaded) it is only the
    name. `first` keeps the first rows, `weight` is how often the source is seen per epoch (1: once). `format` is the
    format of a row, `columns` maps its parts to columns with other names, `variables` are extra variables for the
    chat template; `bad_rows: skip` leaves out rows that cannot be used. `rows` are read instead of files, and `label`
    is the name in messages of a source that the user did not name. `original_fingerprints` are those of the data that
    a resumed run began with, None for a new run (`fingerprints.as_resumed`).

    Example:
        >>> SourceSpec("notes/**/*.md", weight=2.0).name
        'notes/**/*.md'
    """

    source: str
    files: tuple[Path, ...] = ()
    text_column: str | None = None
    documents: DocumentMode = "file"
    first: int | None = None
    weight: float = 1.0
    format: FormatName = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)
    train_on: TrainOn = "completions"
    variables: Mapping[str, Any] = field(default_factory=dict)
    bad_rows: BadRows = "stop"
    rows: RowStream | None = None
    label: str | None = None
    original_fingerprints: frozenset[str] | None = None

    def __post_init__(self) -> None:
        for key, value, known in (
            ("format", self.format, FORMATS),
            ("train_on", self.train_on, TRAIN_ON),
            ("bad_rows", self.bad_rows, BAD_ROWS),
        ):
            if value not in known:
                raise DataError(
                    f"{key}: {value!r} is not supported for {self.source}", f"use one of {', '.join(known)}"
                )
        if self.documents not in DOCUMENT_MODES:
            raise DataError(
                f"documents: {self.documents!r} is not supported for {self.source}",
                f"use one of {', '.join(DOCUMENT_MODES)}",
            )
        if self.text_column is not None and (self.format not in ("auto", "text") or self.columns):
            raise DataError(
                f"{self.source} sets text_column, which is for plain text, and format or columns, which are for "
                "examples",
                "keep one of the two",
            )
        if self.first is not None and self.first < 1:
            raise DataError(f"first: {self.first} selects no rows of {self.source}", "give 1 or more")
        if not 0 < self.weight < float("inf"):
            raise DataError(f"the weight of {self.source} is {self.weight}", "set a number above 0")

    @property
    def name(self) -> str:
        """The name in run folders."""
        return self.source

    @property
    def display_name(self) -> str:
        """The name in messages."""
        return self.label or self.source


@dataclass(frozen=True)
class SourceFile:
    """One file of a source: its path, its name within the source, and how it is read."""

    path: Path
    name: str
    kind: str
    compression: str | None = None
    label: str = ""
    """The name in messages; by default the path."""
    rows: RowStream | None = None
    delimiter: str | None = None
    """The delimiter of a CSV file; None to detect it from the first rows (`readers_csv.delimiter_of`)."""
    accepted: bool = False
    """Whether a resumed run began with this file: it is read even if a new run would reject it."""

    def __post_init__(self) -> None:
        if not self.label:
            object.__setattr__(self, "label", str(self.path))


@dataclass(frozen=True)
class ResolvedSource:
    """A source's files in reading order, and the files next to them that were ignored."""

    spec: SourceSpec
    files: tuple[SourceFile, ...]
    ignored: tuple[str, ...] = field(default=())
    form: Format | None = None
    """The format of rows that are examples; None for plain text."""


def write_texts(name: str, texts: Iterable[str], folder: Path) -> SourceSpec:
    """Writes generated documents to `folder`, so that they are read like any other source.

    Example:
        >>> write_texts("math", ["1 + 1 = 2"], Path("run/data")).files        # doctest: +SKIP
        (PosixPath('run/data/math.jsonl'),)
    """
    return write_rows(name, ({"text": text} for text in texts), folder)


def write_rows(name: str, rows: Iterable[Mapping[str, Any]], folder: Path) -> SourceSpec:
    """`write_texts` for rows of any columns, such as {"messages": …}."""
    path = folder / f"{name}.jsonl"
    with draft(folder, name) as (file, publish):
        file.writelines(f"{json.dumps(row)}\n".encode() for row in rows)
        publish(path)
    return SourceSpec(name, files=(path,))


def resolve(spec: SourceSpec) -> ResolvedSource:
    """Lists the files of a source, sorted by name, so that every machine reads them in the same order.

    Hidden files and unknown extensions of a folder are left out (`ignored`), as is a README next to tables;
    a file that is named explicitly is read as text whatever its extension.

    Example:
        >>> resolve(SourceSpec("books/")).files[0].name        # doctest: +SKIP
        'austen/emma.txt'
    """
    if spec.rows is not None:
        label = spec.label or spec.name
        file = SourceFile(Path(label), label, ROWS, label=label, rows=spec.rows)
        return ResolvedSource(spec, (file,))
    if spec.files:
        root = Path(os.path.commonpath([str(path.parent) for path in spec.files]))
        return _from_list(spec, [(path, path.relative_to(root).as_posix()) for path in spec.files])
    path = path_of(spec.source, "the source", DataError, is_text_file=True)
    if path.is_file():
        if path.stat().st_size == 0:
            raise DataError(f"{spec.source} is empty", "give a file with text in it")
        kind, compression = classify(path)
        return ResolvedSource(spec, (SourceFile(path, path.name, kind or "text", compression),))
    if path.is_dir():
        return _from_folder(spec, path)
    if glob.has_magic(spec.source):
        matches = sorted(Path(p) for p in glob.glob(str(path), recursive=True) if os.path.isfile(p))
        if not matches:
            raise DataError(f"no file matches {spec.source}", "check the pattern; ** matches subfolders")
        root = Path(os.path.commonpath([str(p.parent) for p in matches]))
        return _from_list(spec, [(p, p.relative_to(root).as_posix()) for p in matches])
    if path.is_symlink():
        raise DataError(
            f"{spec.source} is a broken link (to {os.readlink(path)})",
            "point the link to a file or a folder that exists",
        )
    if path.exists():
        raise DataError(
            f"{spec.source} is not a regular file: a device, a pipe or a socket cannot be read twice",
            "write its content to a file and name that file",
        )
    raise DataError(
        f"{spec.source} does not exist", "give a file, a folder or a glob such as 'texts/**/*.txt'"
    )


def classify(path: Path) -> tuple[str | None, str | None]:
    """Returns (kind, compression) by file extension; kind is None if the extension is unknown.

    Example:
        >>> classify(Path("a.jsonl.gz")), classify(Path("a.pdf"))
        (('jsonl', 'gzip'), (None, None))
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compression = COMPRESSIONS.get(suffixes[-1]) if suffixes else None
    if compression:
        suffixes.pop()
    kind = KINDS.get(suffixes[-1]) if suffixes else None
    if compression and kind == "parquet":
        raise DataError(
            f"{path.name} is a compressed Parquet file", "decompress it; Parquet has its own compression"
        )
    return kind, compression


def _from_list(spec: SourceSpec, named: list[tuple[Path, str]]) -> ResolvedSource:
    files = []
    for path, name in named:
        if not path.is_file():
            raise DataError(
                f"{path} of {spec.name} does not exist", "restore it, or download the dataset again"
            )
        kind, compression = classify(path)
        label = spec.label or ""
        files.append(SourceFile(path, label or name, kind or "text", compression, label))
    return ResolvedSource(spec, tuple(files))


def _from_folder(spec: SourceSpec, root: Path) -> ResolvedSource:
    named: list[tuple[str, Path]] = []
    broken: list[str] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                named.append((path.relative_to(root).as_posix(), path))
            elif path.is_symlink() and not path.exists():
                broken.append(path.relative_to(root).as_posix())
    files, ignored = [], []
    for name, path in sorted(named):
        kind, compression = classify(path)
        if kind is None:
            ignored.append(name)
        else:
            files.append(SourceFile(path, name, kind, compression))
    if any(file.kind in TABLES for file in files):
        readmes = {file.name for file in files if Path(file.name).stem.lower() == "readme"}
        ignored += sorted(readmes)
        files = [file for file in files if file.name not in readmes]
    if broken and not files:
        raise DataError(
            f"the folder {spec.source} contains no text files ({sorted(broken)[0]} is a broken link)",
            "point the link to a file that exists",
        )
    if not files:
        seen = (
            f"only {', '.join(ignored[:3])}{', …' if len(ignored) > 3 else ''}" if ignored else "it is empty"
        )
        raise DataError(
            f"the folder {spec.source} contains no text files ({seen})",
            f"add files that end in {', '.join(KINDS)}",
        )
    return ResolvedSource(spec, tuple(files), tuple(sorted(ignored)))
