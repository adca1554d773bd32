"""Shared output of the `numerics` commands."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimtab.cli.studying import tell_written

if TYPE_CHECKING:
    from trimtab.report.document import Document

Out = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Also write records.jsonl and the report to this folder."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON, not the report.")]


def parse_list(text: str) -> list[str]:
    """Splits a comma-separated option value.

    Example:
        >>> parse_list("fp16, bf16,")
        ['fp16', 'bf16']
    """
    return [word.strip() for word in text.split(",") if word.strip()]


def show_study(
    name: str,
    records: Sequence[Mapping[str, Any]],
    document: Document,
    *,
    out: Path | None,
    as_json: bool,
    device: str = "cpu",
) -> None:
    """Prints a study and, with `out`, writes its records and report."""
    from trimtab.lab.numerics.writing import plain_json, write_study
    from trimtab.report.document_console import print_document

    written = [] if out is None else write_study(name, records, document, out, device)
    if as_json:
        print(json.dumps({"study": f"numerics {name}", "records": plain_json(records)}, indent=2))
    else:
        print_document(document)
    if written:
        tell_written(written)
