"""Compares measured with predicted memory and time: two lines during training, a table in the report."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from trimtab.facts.units import format_bytes, format_seconds
from trimtab.report.rundata import RunData, section

BYTES = {
    "allocated": "peak memory of tensors in a step",
    "reserved": "memory reserved by PyTorch's allocator",
    "process": "device memory of the process",
    "host": "host memory of the process",
}
SECONDS = {
    "step_seconds": "optimizer step",
    "evaluation_seconds": "evaluation",
    "checkpoint_seconds": "checkpoint",
}


@dataclass(frozen=True)
class ReceiptRow:
    """One quantity with formatted values."""

    name: str
    predicted: str
    measured: str
    difference: str
    """Measured minus predicted, in percent of the prediction."""


def difference(predicted: float | None, measured: float | None) -> str:
    """Formats the relative difference of a measurement from its prediction; empty if one of them is missing.

    Example:
        >>> difference(7.92, 7.90), difference(231, 238), difference(None, 1)
        ('−0.3 %', '+3.0 %', '')
    """
    if not predicted or measured is None:
        return ""
    return f"{100 * (measured - predicted) / predicted:+.1f} %".replace("-", "−")


def receipt_lines(entry: dict[str, Any]) -> list[str]:
    """Returns a line for memory and one for time, if they were measured.

    Example:
        >>> entry = {"predicted": {"allocated": 2**30}, "measured": {"allocated": 2**30}, "device": {"kind": "cuda"}}
        >>> receipt_lines(entry)
        ['memory: predicted 1.00 GiB, measured 1.00 GiB (+0.0 %)']
    """
    predicted, measured = section(entry, "predicted"), section(entry, "measured")
    lines = []
    allocated, seconds = measured.get("allocated"), _median(measured.get("step_seconds"))
    if allocated is not None:
        # On a CPU, the measurement counts tensors, not the memory of the process.
        counted = ", tensors only" if section(entry, "device").get("kind") == "cpu" else ""
        lines.append(f"memory: {_compare(predicted.get('allocated'), allocated, format_bytes)}{counted}")
    if seconds is not None:
        early = "" if measured.get("warm", True) else ", first steps included"
        lines.append(f"step time: {_compare(predicted.get('step_seconds'), seconds, _duration)}{early}")
    return lines


def receipt_rows(data: RunData) -> list[ReceiptRow]:
    """Returns predictions and measurements of the last start; empty if the run has no receipt."""
    if not data.starts:
        return []
    predicted, measured = (section(data.starts[-1], name) for name in ("predicted", "measured"))
    rows = []
    for key, name in BYTES.items():
        rows.append(_row(name, predicted.get(key), measured.get(key), format_bytes))
    for key, name in SECONDS.items():
        rows.append(_row(name, predicted.get(key), _median(measured.get(key)), _duration))
    return [row for row in rows if row.measured]


def _row(name: str, predicted: float | None, measured: float | None, shown: Any) -> ReceiptRow:
    return ReceiptRow(
        name,
        "not predicted" if not predicted else shown(predicted),
        "" if measured is None else shown(measured),
        difference(predicted, measured),
    )


def _compare(predicted: float | None, measured: float, shown: Any) -> str:
    if not predicted:
        return f"measured {shown(measured)}, not predicted"
    return f"predicted {shown(predicted)}, measured {shown(measured)} ({difference(predicted, measured)})"


def _median(spread: Any) -> float | None:
    found = spread.get("median") if isinstance(spread, dict) else None
    return float(found) if isinstance(found, int | float) else None


def _duration(seconds: float) -> str:
    """Formats seconds with three digits below a minute, so that a difference of one percent is visible.

    Example:
        >>> _duration(0.2312), _duration(12.345)
        ('231 ms', '12.3 s')
    """
    if seconds >= 60:
        return format_seconds(seconds)
    value, unit = (seconds * 1000, "ms") if seconds < 1 else (seconds, "s")
    digits = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:.{digits}f} {unit}"
