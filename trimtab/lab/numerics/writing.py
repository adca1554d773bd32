"""Writes results of numerics studies: as JSON, and as files with records and report."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from trimtab.facts.files import write_atomic
from trimtab.lab.numerics.number_text import short_decimal
from trimtab.lab.records import device_name, provenance, versions
from trimtab.lab.reporting import prepare_folder, write_report
from trimtab.report.document import Document

RECORDS = "records.jsonl"


def plain_json(value: Any) -> Any:
    """Converts dataclasses, enums, fractions and non-finite numbers to plain JSON values.

    Example:
        >>> plain_json({"sum": float("inf"), "exact": Fraction(1, 4), "steps": (1, 2)})
        {'sum': 'inf', 'exact': '0.25', 'steps': [1, 2]}
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Fraction):
        return short_decimal(value, 17)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def torch_facts(device: str = "cpu") -> tuple[str, ...]:
    """Device and torch version, for the header of a report.

    Example:
        >>> torch_facts()                                                                 # doctest: +SKIP
        ('AMD EPYC 7B13', 'torch 2.13.0')
    """
    return device_name(device), f"torch {versions(['torch'])['torch']}"


def write_study(
    name: str, records: Sequence[Mapping[str, Any]], document: Document, folder: Path, device: str = "cpu"
) -> list[Path]:
    """Writes records.jsonl, with commit, versions and device in every line, and the report; returns the files.

    Example:
        >>> write_study("bits", study.records(), bits_document(study), Path("bits"))      # doctest: +SKIP
        [PosixPath('bits/records.jsonl'), PosixPath('bits/report.md'), PosixPath('bits/report.html')]
    """
    prepare_folder(folder)
    origin = provenance(device)
    lines = [
        json.dumps({"study": f"numerics {name}", **plain_json(record), **origin}, ensure_ascii=False)
        for record in records
    ]
    write_atomic(folder / RECORDS, "".join(f"{line}\n" for line in lines))
    return [folder / RECORDS, *write_report(document, folder)]
