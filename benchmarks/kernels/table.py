"""Tables of the runner's data: times, ratios to the fastest peer, shares of the lower bound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trimtab.lab.records import read_records
from trimtab.report.document_markdown import aligned_table

HEAD = (
    "operation", "case", "implementation", "ms", "10–90 %", "fastest peer / this", "lower bound / this", "MiB", "note"
)  # fmt: skip


def read(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The last record of each operation and case."""
    return read_records(path, "op", "case")


def best_peer(record: dict[str, Any]) -> float | None:
    """Milliseconds of the fastest exact peer."""
    times = [
        c["median_ms"]
        for c in record["contestants"].values()
        if c["exact"] and not c["ours"] and "median_ms" in c
    ]
    return min(times, default=None)


def rows(record: dict[str, Any]) -> list[tuple[str, ...]]:
    """Returns the table rows of a case, fastest first; implementations without a time have a note with the reason."""
    peer = best_peer(record)
    where = (record["op"], record["case"])
    if record.get("failed"):
        return [(*where, "–", "–", "–", "–", "–", "–", f"failed: {record['failed']}")]
    out: list[tuple[str, ...]] = []
    contestants = record["contestants"].items()
    for name, c in sorted(contestants, key=lambda item: item[1].get("median_ms", float("inf"))):
        label = f"**{name}**" if c["ours"] else name
        if "median_ms" not in c:
            out.append((*where, label, "–", "–", "–", "–", "–", c["note"]))
            continue
        ms = c["median_ms"]
        ratio = "–" if peer is None else f"{peer / ms:.2f}"
        spread = f"{c['low_ms']:.3g}–{c['high_ms']:.3g}"
        note = "" if c["exact"] else f"approximate: {c['error'] or 'within the allowed error here'}"
        memory = f"{c['peak_bytes'] / 2**20:.0f}"
        share = f"{record['floor_ms'] / ms:.0%}"
        out.append((*where, label, f"{ms:#.3g}", spread, ratio, share, memory, note))
    out += [
        (*where, name, "–", "–", "–", "–", "–", f"absent: {why}") for name, why in record["absent"].items()
    ]
    return out


def markdown(found: list[dict[str, Any]]) -> str:
    """All cases as one aligned Markdown table."""
    lines: list[tuple[str, ...]] = [HEAD]
    for record in found:
        lines += rows(record)
    return aligned_table(lines)


def page(found: list[dict[str, Any]]) -> str:
    """One table per operation with device, commits and versions: the body of the page."""
    parts = []
    for op in dict.fromkeys(record["op"] for record in found):
        mine = [record for record in found if record["op"] == op]
        table = ["| " + " | ".join(HEAD[1:]) + " |", "|" + "---|" * len(HEAD[1:])]
        table += ["| " + " | ".join(row[1:]) + " |" for record in mine for row in rows(record)]
        parts.append("\n".join([f"## {op}", "", _where(mine), "", *table]))
    return "\n\n".join(parts) + "\n"


def _where(found: list[dict[str, Any]]) -> str:
    def of(key: str) -> str:
        return ", ".join(dict.fromkeys(record[key] for record in found))

    last, ceilings = found[-1], [record["ceilings"] for record in found]
    copy = max(c["copy_bytes_per_s"] for c in ceilings) / 1e12
    product = max(c["matmul_flops_per_s"] for c in ceilings) / 1e12
    names = ", ".join(f"{name} {version}" for name, version in last["versions"].items())
    return (
        f"{of('device')}, commit {of('commit')}, {last['time'][:10]}; {names}. Measured ceilings of the device: "
        f"copy {copy:.2f} TB/s, bf16 matmul {product:.0f} TFLOP/s."
    )
