"""Detects a source's format, plain text or a format of examples, from the columns of its first row."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from trimtab.data.formats import PARTS, TURNS, Format, parts_of, type_name
from trimtab.data.readers import read_values
from trimtab.data.sources import TABLES, ResolvedSource, SourceFile, SourceSpec
from trimtab.data.spec import TEXT_COLUMNS
from trimtab.facts.errors import DataError


def detect(source: ResolvedSource) -> Format | None:
    """Returns the format in a source's spec, or detects it from the first row's columns; None for plain text.

    Example:
        >>> detect(resolve(SourceSpec("chats.jsonl"))).name          # doctest: +SKIP
        'messages'
    """
    spec = source.spec
    if spec.format == "text" or (spec.format == "auto" and spec.text_column is not None):
        _refuse_columns(spec)
        return None
    tables = [file for file in source.files if file.kind in TABLES]
    if not tables:
        if spec.format != "auto":
            raise DataError(
                f"{spec.display_name} is plain text, and format: {spec.format} needs rows with columns",
                "use JSON Lines, CSV or Parquet, or remove format",
            )
        _refuse_columns(spec)
        return None
    form = _by_first_row(spec, tables)
    if form is None:
        _refuse_columns(spec)
        return None
    others = [file.name for file in source.files if file.kind not in TABLES]
    if others:
        raise DataError(
            f"{spec.display_name} contains both examples ({tables[0].name}) and plain text ({others[0]})",
            "list them as two separate sources",
        )
    return form


def _refuse_columns(spec: SourceSpec) -> None:
    if spec.columns:
        raise DataError(
            f"{spec.display_name} is read as plain text, and columns maps parts of an example "
            f"({', '.join(spec.columns)})",
            "set format, or text_column instead of columns",
        )


def _by_first_row(spec: SourceSpec, tables: list[SourceFile]) -> Format | None:
    firsts = ((file, row) for file in tables for _, row in itertools.islice(read_values(file), 1))
    file, row = next(firsts, (None, None))
    if file is None:
        if spec.format == "auto" and not spec.columns:
            return None
        raise DataError(f"{spec.display_name} contains no rows", "use a source with rows")
    wanted = list(PARTS) if spec.format == "auto" else [spec.format]
    if spec.columns:
        wanted = [name for name in wanted if set(spec.columns) <= {*PARTS[name][0], *PARTS[name][1]}]
        if not wanted:
            known = "; ".join(f"{name}: {', '.join(parts_of(name))}" for name in PARTS)
            raise DataError(
                f"columns of {spec.display_name} maps {', '.join(spec.columns)}, which no single format has",
                f"map parts of one format: {known}",
            )
    if not isinstance(row, dict):
        if spec.format == "auto":
            return None
        raise DataError(
            f"{file.label} contains {type_name(row)}, not objects",
            f"write objects with {', '.join(PARTS[spec.format][0])}, or remove format",
        )
    for name in wanted:
        candidate = Format(name, spec.columns)
        if all(_fits(part, candidate.get(row, part), candidate, row) for part in PARTS[name][0]):
            return candidate
    if spec.format == "auto" and not spec.columns:
        texts = [name for name in TEXT_COLUMNS if isinstance(row.get(name), str)]
        if {"chosen", "rejected"} <= set(row) and not texts and not file.accepted:
            raise _preferences(file, row)
        return None
    needs = " or ".join(", ".join(spec.columns.get(p, p) for p in PARTS[name][0]) for name in wanted)
    raise DataError(
        f"{file.label} has the columns {', '.join(row)}, but not {needs}",
        "map them with columns, such as columns: {messages: dialog}, or set another format",
    )


def _preferences(file: SourceFile, row: Mapping[str, Any]) -> DataError:
    """The error for preference pairs; its remedy trains on the chosen answers."""
    chosen = row["chosen"]
    if isinstance(chosen, str) and chosen.lstrip().startswith("["):  # messages as JSON, as CSV needs them
        with suppress(ValueError, RecursionError):
            chosen = json.loads(chosen)
    first = chosen[0] if isinstance(chosen, list) and chosen and isinstance(chosen[0], dict) else {}
    has_prompt = first.get("role", first.get("from")) not in (None, "assistant", "gpt")
    if "prompt" in row and not has_prompt:
        key, value = "columns", "{completion: chosen}"
    elif isinstance(chosen, list):
        key, value = "columns", "{messages: chosen}"
    else:
        key, value = "text_column", "chosen"
    return DataError(
        f"{file.label} contains preferences (columns chosen and rejected), and preference training such as DPO is not "
        "supported",
        f"train on the chosen answers: add {key}: {value} to the source, or pass 'data.train.0.{key}={value}' on the "
        "command line",
    )


def _fits(part: str, value: Any, form: Format, row: Mapping[str, Any]) -> bool:
    if form.columns.get(part, part) not in row:
        return False
    if part in TURNS and isinstance(value, str):
        return value.lstrip().startswith("[") or part in form.columns
    return True
