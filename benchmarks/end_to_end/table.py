"""Tables of the runner's data: times and memory, losses, first steps, longest contexts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.end_to_end.jobs import (
    LONGEST_ATTENTION,
    NEAREST,
    OURS,
    PEERS,
    Job,
    cases,
    config_of,
    memory_limit_bytes,
    recipe_of,
)
from trimtab.facts.devices import DeviceFacts
from trimtab.lab.records import read_records
from trimtab.model.families import shape_from_config
from trimtab.model.spec import flops_per_token
from trimtab.plan import find_max_seq_length
from trimtab.plan.make import job_of
from trimtab.plan.max_seq_length import MaxSeqLength
from trimtab.recipe import build
from trimtab.report.document_markdown import aligned_table
from trimtab.run.resolve import resolve_backends

FIRST_LOSS_OFF = 5e-3
LAST_LOSS_OFF = 3e-2
"""Maximum differences of the contestants' first and last losses, which differ by rounding. For bf16 weights, last
losses are compared with trimtab's round-to-nearest variant, as the peers round: with stochastic rounding, trimtab's
default, no update is lost, and losses fall faster."""

TITLES = {
    "llama-8b": "Llama 3.1 8B",
    "qwen3-0.6b": "Qwen3 0.6B",
    "qlora": "QLoRA",
    "full": "full fine-tuning",
    "hf": "Hugging Face",
    "liger": "Liger",
    "unsloth": "Unsloth",
}
LONGEST = (
    "The longest context of Llama 3.1 8B with QLoRA by GPU memory, confirmed by a step under a memory cap"
)

Records = dict[str, dict[str, Any]]


def read(path: Path) -> Records:
    """The last record of each case."""
    return read_records(path, "name")


def page(records: Records) -> str:
    """All tables with device, commits and versions: the body of the page."""
    measured = [record for record in records.values() if "commit" in record]
    commits = ", ".join(dict.fromkeys(record["commit"] for record in measured))
    last = max(measured, key=lambda record: record["time"])
    names = ", ".join(f"{name} {version}" for name, version in last["versions"].items())
    device = records["device"]
    rate = device["matmul_flops_per_s"]
    ceiling = f"; bf16 matmul {rate / 1e12:.0f} TFLOP/s" if rate else ""
    host = max((record.get("host_total_bytes", 0) for record in measured), default=0)
    ceiling += f"; a host with {host / 2**30:.0f} GiB" if host else ""
    return (
        f"{device['device']}, commit {commits}, {last['time'][:10]}; {names}{ceiling}.\n\n{markdown(records)}"
    )


def markdown(records: Records) -> str:
    """All tables that have rows."""
    tables = {
        "Whole steps: ms @ peak GiB of tensors": _steps(records),
        "Losses of the same steps": _losses(records),
        "The first step": _first_steps(records),
        "Longest context, batch 1": _longest(records),
    }
    return "\n".join(
        f"### {title}\n\n{aligned_table(rows)}" for title, rows in tables.items() if len(rows) > 1
    )


def problems(records: Records) -> list[str]:
    """Failed trimtab cases, and losses of contestants that differ too much."""
    found = [
        f"{record['name']}: {record['failed']}"
        for record in records.values()
        if record.get("failed") and (record.get("case") or {}).get("contestant") in (*OURS, NEAREST)
    ]
    for job, of_job in by_job(records).items():
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
                    f"{job.name}: losses differ by {apart:.4f} after step {count if which else 1}: {losses}"
                )
    return found


def floor_s(job: Job, flops_per_s: float) -> float:
    """Lower bound of a step's time: its matrix products at the device's best measured matmul rate.

    Frozen weights need no weight gradients, which saves one of three products; attention's FLOPs are unchanged.

    Example:
        >>> round(1e3 * floor_s(Job("llama-8b", "qlora", 2, 2048), 780e12))
        181
    """
    shape = shape_from_config(config_of(job.model), job.model)
    flops = flops_per_token(shape, job.tokens)
    if job.method == "qlora":
        flops -= flops_per_token(shape, 1, training=False)
    return flops * job.rows * job.tokens / flops_per_s


def by_job(records: Records) -> dict[Job, Records]:
    """Finished cases by job and contestant, the jobs sorted by packing, model and length."""
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
    head = [
        "job",
        *PEERS,
        *(f"**{name}**" for name in OURS),
        "fastest peer / ours",
        "lowest-memory peer / tight",
    ]
    rows = [[*head, "floor ms", "of floor"]]
    why = {r["name"]: r.get("absent") or r.get("failed") for r in records.values()}
    for job, of_job in by_job(records).items():
        peers = [of_job[name] for name in PEERS if name in of_job]
        cells = [
            _cell(of_job.get(name)) if name in of_job else _short(why.get(f"{job.name}/{name}"))
            for name in (*PEERS, *OURS)
        ]
        fastest = min((r["median_ms"] for r in peers), default=None) if not _untried(job, records) else None
        lowest = min(peers, key=lambda r: r["peak_bytes"] or 0, default=None)
        ratios = [
            _ratio(fastest, of_job.get("trimtab")),
            _ratio(lowest and lowest["median_ms"], of_job.get("trimtab tight")),
        ]
        least = None if not ceiling or job.packed else 1e3 * floor_s(job, ceiling)
        share = "–"
        if least is not None and "trimtab" in of_job:
            share = f"{least / of_job['trimtab']['median_ms']:.0%}"
        rows.append([job.name, *cells, *ratios, "–" if least is None else f"{least:.0f}", share])
    return rows


def _untried(job: Job, records: Records) -> set[str]:
    """Peers with a case but no record for the job: the fastest peer is then unknown."""
    wanted = {case for case in cases() if case.job == job and case.contestant in PEERS}
    return {case.contestant for case in wanted if case.name not in records}


def _short(reason: str | None) -> str:
    """Short text of an empty cell."""
    if reason is None:
        return "–"
    return "out of memory" if "out of memory" in reason.lower() else reason[:24]


def _ratio(peer_ms: float | None, record: dict[str, Any] | None) -> str:
    return "–" if peer_ms is None or record is None else f"{peer_ms / record['median_ms']:.2f}"


def _losses(records: Records) -> list[list[str]]:
    rows = [["job", "contestant", "first", "after the last common step", "steps"]]
    for job, of_job in by_job(records).items():
        count = min(len(record["losses"]) for record in of_job.values())
        for name, record in of_job.items():
            losses = record["losses"]
            rows.append([job.name, name, f"{losses[0]:.4f}", f"{losses[count - 1]:.4f}", str(count)])
    return rows


def _first_steps(records: Records) -> list[list[str]]:
    """First steps, with compile times for trimtab (the peers do not compile)."""
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


def by_arithmetic(model: str, cap_gb: float) -> MaxSeqLength:
    """The longest context by the planner on a GPU of `cap_gb`, with unlimited host memory.

    Example:
        >>> by_arithmetic("llama-8b", 24).tokens
        219648
    """
    recipe = recipe_of(Job(model, "qlora", 1, 1024), model, None, "cuda", None)
    recipe["model"]["attn_implementation"] = LONGEST_ATTENTION
    gpu = DeviceFacts("NVIDIA H200", "cuda", 150 * 10**9, capability=(9, 0), bf16=True)
    shape = shape_from_config(config_of(model), model)
    made = build(recipe)
    job = job_of(made, shape, gpu, resolve_backends(made, shape, gpu, 1))
    return find_max_seq_length(job, gpu, memory_limit_bytes(cap_gb, "cuda"))


def _longest(records: Records) -> list[list[str]]:
    head = ["GB", "by arithmetic", "host GiB", "proposed here", "confirmed", "layers"]
    rows = [[*head, "first step s", "peak GiB", "host GiB", "how"]]
    capped = [r for r in records.values() if (r.get("case") or {}).get("cap_gb") is not None]
    for record in sorted(capped, key=lambda r: r["case"]["cap_gb"]):
        case = record["case"]
        name, _, layers = case["job"]["model"].partition("/")
        planned = by_arithmetic(name, case["cap_gb"])
        start = [
            f"{case['cap_gb']:g}",
            f"{planned.tokens:,}",
            "–" if planned.setting is None else f"{planned.setting.host / 2**30:.1f}",
            f"{record.get('proposed', 0):,}",
        ]
        if "confirmed" not in record:
            rows.append([*start, "–", "–", "–", "–", "–", record.get("failed", "–")])
            continue
        peak, host = record["peak_bytes"], record["chosen"]["host_bytes"]
        rows.append(
            [
                *start,
                f"{record['confirmed']:,}",
                f"{layers or config_of(name)['num_hidden_layers']}",
                f"{record['first_step_s']:.1f}",
                "–" if peak is None else f"{peak / 2**30:.2f}",
                f"{(host or 0) / 2**30:.1f}",
                str(record["chosen"]["memory"]),
            ]
        )
    return rows


def summary(records: Records) -> str:
    """The README's tables: for each job the fastest and the lowest-memory peer, compared with trimtab; then the longest
    contexts."""
    rows = [["job", "fastest peer", "trimtab", "", "lowest-memory peer", "trimtab in its memory", ""]]
    for job, of_job in by_job(records).items():
        peers = {name: of_job[name] for name in PEERS if name in of_job}
        if job.packed or _untried(job, records) or not {"trimtab", "trimtab tight"} <= set(of_job):
            continue
        fastest = min(peers, key=lambda name: peers[name]["median_ms"])
        lowest = min(peers, key=lambda name: peers[name]["peak_bytes"] or 0)
        row = [f"{TITLES[job.model]}, {TITLES[job.method]}, {job.rows} × {job.tokens:,}"]
        for name, mine in ((fastest, "trimtab"), (lowest, "trimtab tight")):
            peer, ours = peers[name], of_job[mine]
            title = " ".join(TITLES.get(word, word) for word in name.split())
            row += [f"{_cell(peer)} {title}", f"**{_cell(ours)}**", f"{_ratio(peer['median_ms'], ours)} ×"]
        rows.append(row)
    lengths = [["GPU memory, GB"], ["tokens"]]
    capped = [r for r in records.values() if "confirmed" in r]
    for record in sorted(capped, key=lambda r: r["case"]["cap_gb"]):
        lengths[0].append(f"{record['case']['cap_gb']:g}")
        part = "*" if "/" in record["case"]["job"]["model"] else ""
        lengths[1].append(f"{record['confirmed']:,}{part}")
    parts = (
        " (* measured with 8 of its 32 layers; longer ones were not tried)"
        if "*" in "".join(lengths[1])
        else ""
    )
    return f"{aligned_table(rows)}\n{LONGEST}{parts}:\n\n{aligned_table(lengths)}"
