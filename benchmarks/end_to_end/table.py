"""The tables made from the runner's data: times and memory beside each other, losses, first steps, longest contexts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.end_to_end.jobs import NEAREST, OURS, PEERS, Job, config_of
from benchmarks.records import read as read_records
from trimtab.facts.shapes_hf import shape_from_config
from trimtab.model.spec import flops_per_token

FIRST_LOSS_OFF = 5e-3
LAST_LOSS_OFF = 3e-2
"""How far first and last losses of contestants may lie apart; they differ in rounding. Last ones of bf16 weights are
compared with those of ours that round to the nearest, as the peers do: by chance, as ours do otherwise, no update is
lost, and losses fall faster."""

Records = dict[str, dict[str, Any]]


def read(path: Path) -> Records:
    """The last record of each case."""
    return read_records(path, "name")


def page(records: Records) -> str:
    """The tables with where and with what they were measured: the body of a page."""
    measured = [record for record in records.values() if "commit" in record]
    commits = ", ".join(dict.fromkeys(record["commit"] for record in measured))
    last = max(measured, key=lambda record: record["time"])
    names = ", ".join(f"{name} {version}" for name, version in last["versions"].items())
    device = records["device"]
    rate = device["matmul_flops_per_s"]
    ceiling = f"; a bf16 product {rate / 1e12:.0f} TFLOP/s" if rate else ""
    return (
        f"{device['device']}, commit {commits}, {last['time'][:10]}; {names}{ceiling}.\n\n{markdown(records)}"
    )


def markdown(records: Records) -> str:
    """All tables, those without a row left out."""
    tables = {
        "Whole steps: ms @ GiB of tensors at the peak": _steps(records),
        "Losses of the same steps": _losses(records),
        "The first step": _first_steps(records),
        "Longest context, batch 1": _longest(records),
    }
    return "\n".join(f"### {title}\n\n{_aligned(rows)}" for title, rows in tables.items() if len(rows) > 1)


def problems(records: Records) -> list[str]:
    """What must not be: a case of ours that failed, losses that are apart."""
    found = [
        f"{record['name']}: {record['failed']}"
        for record in records.values()
        if record.get("failed") and (record.get("case") or {}).get("contestant") in (*OURS, NEAREST)
    ]
    for job, of_job in _by_job(records).items():
        for which, allowed in ((0, FIRST_LOSS_OFF), (-1, LAST_LOSS_OFF)):
            if which and NEAREST in of_job:
                of_job = {name: record for name, record in of_job.items() if name not in OURS}
            count = min((len(r["losses"]) for r in of_job.values()), default=0)
            if not count:
                continue
            losses = {name: r["losses"][0 if which == 0 else count - 1] for name, r in of_job.items()}
            apart = max(losses.values()) - min(losses.values())
            if not apart <= allowed:
                found.append(
                    f"{job.name}: losses are {apart:.4f} apart after {count if which else 1}: {losses}"
                )
    return found


def floor_s(job: Job, flops_per_s: float) -> float:
    """The least time of a micro-step: its products at the rate of the device's best product.

    Frozen weights have no gradients of their own, so two of three products; attention's as they are.

    Example:
        >>> round(1e3 * floor_s(Job("llama-8b", "qlora", 2, 2048), 780e12))
        181
    """
    shape = shape_from_config(config_of(job.model), job.model)
    a_token = flops_per_token(shape, job.tokens)
    if job.method == "qlora":
        a_token -= flops_per_token(shape, 1, training=False)
    return a_token * job.rows * job.tokens / flops_per_s


def _by_job(records: Records) -> dict[Job, Records]:
    """Finished cases by job and contestant, the jobs in their records' order."""
    found: dict[Job, Records] = {}
    for record in records.values():
        case = record.get("case")
        if not case or case["cap_gb"] is not None or case["start"] or not record.get("median_ms"):
            continue
        found.setdefault(Job(**case["job"]), {})[case["contestant"]] = record
    return dict(sorted(found.items(), key=lambda item: (item[0].packed, item[0].model, item[0].tokens)))


def _cell(record: dict[str, Any] | None) -> str:
    if record is None:
        return "–"
    memory = record["peak_bytes"]
    return f"{record['median_ms']:.0f}" + ("" if memory is None else f" @ {memory / 2**30:.1f}")


def _steps(records: Records) -> list[list[str]]:
    ceiling = records.get("device", {}).get("matmul_flops_per_s")
    head = ["job", *PEERS, *(f"**{name}**" for name in OURS), "fastest peer / ours", "thriftiest / tight"]
    rows = [[*head, "floor ms", "of floor"]]
    why = {r["name"]: r.get("absent") or r.get("failed") for r in records.values()}
    for job, of_job in _by_job(records).items():
        peers = [of_job[name] for name in PEERS if name in of_job]
        cells = [
            _cell(of_job.get(name)) if name in of_job else _short(why.get(f"{job.name}/{name}"))
            for name in (*PEERS, *OURS)
        ]
        fastest = min((r["median_ms"] for r in peers), default=None)
        thrifty = min(peers, key=lambda r: r["peak_bytes"] or 0, default=None)
        ratios = [
            _ratio(fastest, of_job.get("trimtab")),
            _ratio(thrifty and thrifty["median_ms"], of_job.get("trimtab tight")),
        ]
        least = None if not ceiling or job.packed else 1e3 * floor_s(job, ceiling)
        share = "–"
        if least is not None and "trimtab" in of_job:
            share = f"{least / of_job['trimtab']['median_ms']:.0%}"
        rows.append([job.name, *cells, *ratios, "–" if least is None else f"{least:.0f}", share])
    return rows


def _short(reason: str | None) -> str:
    """Why a cell is empty, in a word or two."""
    if reason is None:
        return "–"
    return "out of memory" if "out of memory" in reason.lower() else reason[:24]


def _ratio(peer_ms: float | None, record: dict[str, Any] | None) -> str:
    return "–" if peer_ms is None or record is None else f"{peer_ms / record['median_ms']:.2f}"


def _losses(records: Records) -> list[list[str]]:
    rows = [["job", "contestant", "first", "after the last common step", "steps"]]
    for job, of_job in _by_job(records).items():
        count = min(len(record["losses"]) for record in of_job.values())
        for name, record in of_job.items():
            losses = record["losses"]
            rows.append([job.name, name, f"{losses[0]:.4f}", f"{losses[count - 1]:.4f}", str(count)])
    return rows


def _first_steps(records: Records) -> list[list[str]]:
    """Ours alone compiles; the peers' first steps stand beside it."""
    rows = [["job", "contestant", "load s", "load GiB", "first step s", "programs", "compiling s"]]
    for record in records.values():
        case = record.get("case")
        if not case or case["cap_gb"] is not None or "first_step_s" not in record:
            continue
        name = case["contestant"] + {"cold": ", empty cache", "warm": ", filled cache"}.get(case["start"], "")
        memory = record["load_peak_bytes"]
        compiled = "compilations" in record and record["chosen"]["compile"].get("on")
        rows.append(
            [
                Job(**case["job"]).name,
                name,
                f"{record['load_s']:.1f}",
                "–" if memory is None else f"{memory / 2**30:.2f}",
                f"{record['first_step_s']:.1f}",
                str(record["compilations"]) if compiled else "–",
                f"{record['compile_s']:.1f}" if compiled else "–",
            ]
        )
    return rows


def _longest(records: Records) -> list[list[str]]:
    rows = [["model", "GB", "proposed", "confirmed", "step s", "peak GiB", "host GiB", "how"]]
    capped = [r for r in records.values() if (r.get("case") or {}).get("cap_gb") is not None]
    for record in sorted(capped, key=lambda r: r["case"]["cap_gb"]):
        case = record["case"]
        start = [case["job"]["model"], f"{case['cap_gb']:g}", f"{record.get('proposed', 0):,}"]
        if "confirmed" not in record:
            rows.append([*start, "–", "–", "–", "–", record.get("failed", "–")])
            continue
        peak, host = record["peak_bytes"], record["chosen"]["host_bytes"]
        rows.append(
            [
                *start,
                f"{record['confirmed']:,}",
                f"{record['first_step_s']:.1f}",
                "–" if peak is None else f"{peak / 2**30:.2f}",
                f"{(host or 0) / 2**30:.1f}",
                str(record["chosen"]["memory"]),
            ]
        )
    return rows


def _aligned(rows: list[list[str]]) -> str:
    """A table that also reads well in a terminal."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines) + "\n"
