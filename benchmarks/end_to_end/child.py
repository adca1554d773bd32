"""A process of the benchmark: loads a model once, runs its cases, writes one JSON line per case.

python -m benchmarks.end_to_end.child REQUEST.json RESULTS.jsonl
"""

from __future__ import annotations

import contextlib
import gc
import json
import statistics
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.end_to_end import peers, world
from benchmarks.end_to_end.jobs import LONG, NEAREST, OURS, Case, Job, config_of
from trimtab.lab.contests import first_line
from trimtab.lab.records import append_record
from trimtab.lab.timing import ceilings, synchronize, time_once

STEPS = 10
"""Maximum number of timed steps within `BUDGET_S` seconds."""
BUDGET_S = 6.0
FEWEST = 2
TRIES = 3
CUT = 0.97
"""Factor that reduces a proposed length that does not fit."""


def read_request(path: Path) -> dict[str, Any]:
    """Read the request file of the parent process and parse its cases."""
    request: dict[str, Any] = json.loads(path.read_text())
    request["cases"] = [Case(**{**case, "job": Job(**case["job"])}) for case in request["cases"]]
    return request


def main(words: list[str]) -> int:
    """Run the request's cases; an exception is recorded as a case's result, and the next case runs."""
    request, results = read_request(Path(words[0])), Path(words[1])
    device = request["device"]
    if request.get("ceilings"):
        append_record(results, {"name": "device", **_ceilings(device)})
    kept: dict[str, Any] = {}
    for case in request["cases"]:
        record: dict[str, Any] = {"name": case.name, "case": asdict(case)}
        started = time.perf_counter()
        try:
            record |= run(case, request, device, kept)
        except torch.OutOfMemoryError:
            record["failed"] = "out of memory"
            kept.clear()
        except Exception as error:  # noqa: BLE001 - recorded as the result
            record["failed"] = f"{type(error).__name__}: {first_line(error)}"
        record["process_s"] = round(time.perf_counter() - started, 2)
        append_record(results, record)
        _clean_up(device)
    return 0


def run(case: Case, request: dict[str, Any], device: str, kept: dict[str, Any]) -> dict[str, Any]:
    """Measure one case; `kept` caches a peer's model for its next length."""
    root = Path(request["weights"])
    folder = world.model_folder(root, case.job.model, device)
    adapter = world.adapter_folder(root, case.job.model)
    if case.contestant in (*OURS, NEAREST):
        if case.cap_gb is not None:
            return _longest(case, folder, adapter, request, device)
        return _ours(case, folder, adapter, request, device)
    absent = peers.missing(case.contestant)
    if absent is not None:
        return {"absent": absent}
    tokens = world.make_tokens(case.job)
    started = time.perf_counter()
    longest = max(other.job.tokens for other in request["cases"])
    step = peers.build(case, folder, adapter, tokens, device, kept, longest)
    return _measured(step, case, device, started)


def _ours(case: Case, folder: Path, adapter: Path, request: dict[str, Any], device: str) -> dict[str, Any]:
    from benchmarks.end_to_end import ours
    from trimtab.adapt import compilations

    limit = request["limits"].get(case.job.name) if case.contestant == "trimtab tight" else None
    started = time.perf_counter()
    prepared = ours.prepared_for(case, folder, adapter, device, limit)
    before = compilations()
    step, chosen = ours.build(
        prepared, folder, world.make_tokens(case.job), nearest=case.contestant == NEAREST
    )
    record = _measured(step, case, device, started, captured=chosen["graphs"]["on"])
    record["load_peak_bytes"] = chosen.pop("load_peak_bytes")
    count, seconds = compilations()
    return record | {
        "chosen": chosen,
        "limit_gib": limit,
        "compilations": count - before[0],
        "compile_s": seconds - before[1],
    }


def _longest(case: Case, folder: Path, adapter: Path, request: dict[str, Any], device: str) -> dict[str, Any]:
    """The planner proposes a length, and one real step under the allocator's cap confirms it."""
    from benchmarks.end_to_end import ours
    from trimtab.facts.devices import host_memory

    root = Path(request["weights"])
    name, _, layers = case.job.model.partition("/")
    whole, its_adapter = world.config_folder(root, name), world.adapter_folder(root, name)
    proposed = ours.longest(case, whole, its_adapter, device)
    if proposed == 0:
        return {"failed": "nothing fits", "proposed": 0}
    tokens = request["tokens"].get(f"{case.cap_gb:g}") or min(
        proposed, request["most_tokens"], _positions(name)
    )
    for _ in range(TRIES):
        one = replace(case, job=replace(case.job, tokens=tokens), start="cold")
        more: dict[str, Any] = {}
        if layers:
            cap_gb, more = ours.part_of(one, (whole, folder), (its_adapter, adapter), device)
            one = replace(one, cap_gb=cap_gb)
        try:
            started = time.perf_counter()
            prepared = ours.prepared_for(one, folder, adapter, device, None, more)
            step, chosen = ours.build(prepared, folder, world.make_tokens(one.job))
            record = _measured(step, one, device, started)
        except torch.OutOfMemoryError:
            _clean_up(device)
            tokens = int(tokens * CUT) // 256 * 256
            continue
        return record | {
            "proposed": proposed,
            "confirmed": tokens,
            "chosen": chosen,
            "layers": layers or None,
            "allocator_cap_bytes": prepared.resolved.memory_plan.allocator_bytes,
            "host_total_bytes": host_memory()[0],
        }
    return {"failed": f"out of memory down to {tokens} tokens", "proposed": proposed}


def _positions(model: str) -> int:
    """The model's maximum sequence length."""
    return int(config_of(model)["max_position_embeddings"])


def _measured(
    step: peers.Step, case: Case, device: str, started: float, *, captured: bool = False
) -> dict[str, Any]:
    """Times of synchronized steps after warm-up, losses of all steps, and peak memory of tensors."""
    synchronize(device)
    loaded = time.perf_counter()
    load_peak = _peak(device)
    losses: list[float] = []
    times: list[float] = []

    def once() -> float:
        return time_once(lambda: losses.append(float(step())), device)

    first = once()
    if not case.start:
        if case.job.tokens < LONG or captured:
            once()  # allocator and autotuner warm-up
            once()  # CUDA graph capture
        until = time.perf_counter() + BUDGET_S
        while len(times) < FEWEST or (len(times) < STEPS and time.perf_counter() < until):
            times.append(once())
    return {
        "load_s": round(loaded - started, 2),
        "load_peak_bytes": load_peak,
        "first_step_s": first,
        "median_ms": 1e3 * statistics.median(times) if times else None,
        "low_ms": 1e3 * min(times, default=first),
        "high_ms": 1e3 * max(times, default=first),
        "steps": len(times),
        "peak_bytes": _peak(device),
        "losses": losses,
    }


def _ceilings(device: str) -> dict[str, Any]:
    if device != "cuda":
        return {"device": "cpu", "matmul_flops_per_s": None}
    return asdict(ceilings())


def _peak(device: str) -> int | None:
    """Peak memory since the last call."""
    if device != "cuda":
        return None
    peak = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return peak


def _clean_up(device: str) -> None:
    gc.collect()
    torch._dynamo.reset()
    if device == "cuda":
        with contextlib.suppress(RuntimeError):  # after an illegal access the next case reports the error
            torch.cuda.set_per_process_memory_fraction(1.0)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
