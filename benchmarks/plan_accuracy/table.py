"""Errors of the plan by method and by term: medians and worst. No torch."""

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
    return {name: one for name, one in found.items() if commit in (None, one.get("commit"))}


def error(record: dict[str, Any], quantity: str) -> float | None:
    """(predicted − measured) / measured; None where one of them is missing.

    Example:
        >>> error({"predicted": {"allocated": 102}, "measured": {"allocated": 100}}, "allocated")
        0.02
    """
    told, seen = (record.get(side, {}).get(quantity) for side in ("predicted", "measured"))
    if quantity == "process" and not record.get("fresh_process", True):
        return None  # kernels of earlier cases are loaded into the same process
    return None if not told or not seen else (told - seen) / seen


def term_error(record: dict[str, Any], term: str) -> float | None:
    """The error of one bucket, as a share of the measured peak: what it adds to the error of the total."""
    told, seen = (record.get(side, {}).get("buckets", {}).get(term) for side in ("predicted", "measured"))
    whole = record.get("measured", {}).get("allocated")
    return None if told is None or seen is None or not whole else (told - seen) / whole


def summary(errors: Iterable[float | None]) -> str:
    """Median and worst of absolute errors, and how many there are.

    Example:
        >>> summary([0.01, -0.03, None, 0.02])
        '2.00 % / -3.00 % (3)'
    """
    known = [one for one in errors if one is not None]
    if not known:
        return "–"
    median = statistics.median(abs(one) for one in known)
    worst = max(known, key=abs)
    return f"{median:.2%} / {worst:+.2%} ({len(known)})".replace("%", " %")


def by_group(records: Records, group: Callable[[Case], str]) -> list[list[str]]:
    """A row for each group of cases: the errors of each quantity."""
    rows = [["", *(f"{name}, median / worst (cases)" for name in QUANTITIES.values())]]
    groups: dict[str, list[dict[str, Any]]] = {}
    for name, record in records.items():
        if "failed" not in record:
            groups.setdefault(group(Case.parse(name)), []).append(record)
    for name, mine in sorted(groups.items()):
        rows.append([name, *(summary(error(one, quantity) for one in mine) for quantity in QUANTITIES)])
    everything = [one for mine in groups.values() for one in mine]
    rows.append(["all", *(summary(error(one, quantity) for one in everything) for quantity in QUANTITIES)])
    return rows


def markdown(records: Records) -> str:
    """All tables: by method, by model, by what is special, by term, and each case."""
    good = {name: one for name, one in records.items() if "failed" not in one}
    failed = [[name, one["failed"]] for name, one in records.items() if "failed" in one]
    terms = [["term", "error as a share of the peak, median / worst (cases)"]]
    terms += [[term, summary(term_error(one, term) for one in good.values())] for term in TERMS]
    parts = [
        ("By method", by_group(records, lambda case: case.method)),
        ("By model", by_group(records, lambda case: case.model)),
        ("By kind of job", by_group(records, _kind)),
        ("By term", terms),
        ("Cases", [_HEAD, *(_row(name, one) for name, one in good.items())]),
    ]
    if failed:
        parts.append(("Failed", [["case", "why"], *failed]))
    return "\n".join(f"### {title}\n\n{aligned_table(rows)}" for title, rows in parts)


def _kind(case: Case) -> str:
    """What is most special about a case."""
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
    told, seen = record["predicted"], record["measured"]

    def cell(value: float | None, scale: float, digits: int) -> str:
        return "–" if value is None else f"{value * scale:.{digits}f}"

    def share(quantity: str) -> str:
        found = error(record, quantity)
        return "–" if found is None else f"{found:+.2%}"

    return [
        name,
        cell(told["allocated"], 2**-30, 3),
        cell(seen["allocated"], 2**-30, 3),
        share("allocated"),
        cell(seen["process"], 2**-30, 3),
        share("process"),
        cell(told["step_seconds"], 1e3, 1),
        cell(seen["step_seconds"], 1e3, 1),
        share("step_seconds"),
    ]
