"""Errors of the plan by method and by term: median and worst. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.plan_accuracy.cases import Case
from benchmarks.plan_accuracy.readings import TERMS
from trimtab.lab.records import read_records
from trimtab.report.document_markdown import aligned_table

Records = Mapping[str, dict[str, Any]]
QUANTITIES = {
    "allocated": "allocated peak",
    "reserved": "reserved peak",
    "process": "whole process",
    "step_seconds": "step time",
}


def read(path: Path, commit: str | None = None) -> dict[str, dict[str, Any]]:
    """The last record of each case, of one commit or of any."""
    found = read_records(path, "case")
    return {name: record for name, record in found.items() if commit in (None, record.get("commit"))}


def error(record: dict[str, Any], quantity: str) -> float | None:
    """(predicted − measured) / measured; None if one of them is missing.

    Example:
        >>> error({"predicted": {"allocated": 102}, "measured": {"allocated": 100}}, "allocated")
        0.02
    """
    predicted, measured = (record.get(side, {}).get(quantity) for side in ("predicted", "measured"))
    return None if not predicted or not measured else (predicted - measured) / measured


def term_error(record: dict[str, Any], term: str) -> float | None:
    """The error of one term relative to the measured peak: its contribution to the total error."""
    predicted, measured = (
        record.get(side, {}).get("buckets", {}).get(term) for side in ("predicted", "measured")
    )
    peak = record.get("measured", {}).get("allocated")
    return None if predicted is None or measured is None or not peak else (predicted - measured) / peak


def summary(errors: Iterable[float | None]) -> str:
    """Median and worst absolute error, and the number of errors.

    Example:
        >>> summary([0.01, -0.03, None, 0.02])
        '2.00 % / -3.00 % (3)'
    """
    known = [value for value in errors if value is not None]
    if not known:
        return "–"
    median = statistics.median(abs(value) for value in known)
    worst = max(known, key=abs)
    return f"{median:.2%} / {worst:+.2%} ({len(known)})".replace("%", " %")


def by_group(records: Records, group: Callable[[Case], str]) -> list[list[str]]:
    """One row per group of cases with the errors of each quantity."""
    rows = [["", *(f"{name}, median / worst (cases)" for name in QUANTITIES.values())]]
    groups: dict[str, list[dict[str, Any]]] = {}
    for name, record in records.items():
        if "failed" not in record:
            groups.setdefault(group(Case.parse(name)), []).append(record)
    for name, mine in sorted(groups.items()):
        rows.append([name, *(summary(error(record, quantity) for record in mine) for quantity in QUANTITIES)])
    everything = [record for mine in groups.values() for record in mine]
    rows.append(
        ["all", *(summary(error(record, quantity) for record in everything) for quantity in QUANTITIES)]
    )
    return rows


def markdown(records: Records) -> str:
    """All tables: by method, model, kind of job and term, and all cases."""
    measured = {name: record for name, record in records.items() if "failed" not in record}
    failed = [[name, record["failed"]] for name, record in records.items() if "failed" in record]
    terms = [["term", "error as a share of the peak, median / worst (cases)"]]
    terms += [[term, summary(term_error(record, term) for record in measured.values())] for term in TERMS]
    parts = [
        ("By method", by_group(records, lambda case: case.method)),
        ("By model", by_group(records, lambda case: case.model)),
        ("By kind of job", by_group(records, _kind)),
        ("By term", terms),
        ("Cases", [_HEAD, *(_row(name, record) for name, record in measured.items())]),
    ]
    if failed:
        parts.append(("Failed", [["case", "why"], *failed]))
    return "\n".join(f"### {title}\n\n{aligned_table(rows)}" for title, rows in parts)


def _kind(case: Case) -> str:
    """The kind of a case, by its most unusual option."""
    options = case.options
    if options.get("compile") == "true":
        return "compiled"
    if options.get("graphs") == "false":
        return "eager"
    if "limit" in options:
        return "memory limit"
    if "offload" in options.get("recompute", ""):
        return "offloaded"
    return "packed" if case.packed else "plain"


_HEAD = [
    "case",
    "GiB predicted",
    "measured",
    "error",
    "process",
    "error",
    "ms predicted",
    "measured",
    "error",
]


def _row(name: str, record: dict[str, Any]) -> list[str]:
    predicted, measured = record["predicted"], record["measured"]

    def cell(value: float | None, scale: float, digits: int) -> str:
        return "–" if value is None else f"{value * scale:.{digits}f}"

    def share(quantity: str) -> str:
        found = error(record, quantity)
        return "–" if found is None else f"{found:+.2%}"

    return [
        name,
        cell(predicted["allocated"], 2**-30, 3),
        cell(measured["allocated"], 2**-30, 3),
        share("allocated"),
        cell(measured["process"], 2**-30, 3),
        share("process"),
        cell(predicted["step_seconds"], 1e3, 1),
        cell(measured["step_seconds"], 1e3, 1),
        share("step_seconds"),
    ]
