"""Whether the memory setting chosen under a limit is the fastest: `python -m benchmarks.chosen_settings`.

    python -m benchmarks.chosen_settings [--only TEXT] [--seconds 540] [--out FILE.jsonl] [--table FILE.jsonl] [--tiny]

For each job and each of eight memory limits, from the lowest that a step needs to all that it can use, the chosen
recompute policies, tiles, loss memory and dequantized copies run under the limit, and so do other settings that fit:
for each pair of policies and each number of tiles, as many layers as fit with the faster policy, the fastest by
prediction first. Several processes plan the settings before any is measured. Each line is written when its setting is
finished; an interrupted command resumes.
"""

from __future__ import annotations

import argparse
import functools
import gc
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from benchmarks.end_to_end import world
from benchmarks.end_to_end.jobs import LLAMA_8K, LLAMA_32K, LLAMA_SHORT, QWEN_SHORT, recipe_of
from benchmarks.end_to_end.jobs import Job as Model
from trimtab.adapt import recompute, set_dequantized_copies
from trimtab.adapt.spec_recompute import OFFLOADING, POLICIES, sort_policies
from trimtab.data import Batch
from trimtab.facts.devices import DeviceFacts, host_cores
from trimtab.lab.records import append_record, checkout_commit, file_name, provenance, read_records
from trimtab.lab.timing import time_once
from trimtab.lab.training_step import build_step, build_step_of
from trimtab.model.building import torch_dtype
from trimtab.plan.dequantized_copies import add_dequantized_copies
from trimtab.plan.job import Job
from trimtab.plan.layers import segments_of
from trimtab.plan.memory import BYTES_OUTSIDE_ALLOCATOR, PROCESS_BYTES, state_bytes, weight_bytes
from trimtab.plan.memory_search import (
    FRAGMENTATION,
    SLACK,
    MemorySetting,
    find_setting_with_policies,
    lowest_memory,
    make_setting,
)
from trimtab.plan.resolved import CudaGraphsConfig, MemoryPlan
from trimtab.recipe import build as build_recipe
from trimtab.report.document_markdown import aligned_table
from trimtab.run.prepare import Prepared, prepare

RESULTS = Path(__file__).parent / "results"
JOBS = (QWEN_SHORT, LLAMA_SHORT, LLAMA_8K, LLAMA_32K)
TINY = (Model("tiny-llama-8b", "qlora", 2, 64),)
LIMITS = 8
BEATEN = 1.05
"""A chosen setting may take at most this much longer than another one that fits."""
BUDGET_S, FEWEST, MOST = 1.2, 2, 8
"""Seconds of timed steps per setting, and their minimum and maximum number."""
LONG_S = 1.0
"""Longer steps run without CUDA graphs, which would hide no launches, and with half as many other settings."""


@dataclass(frozen=True)
class Candidate:
    """A setting under a limit."""

    job: str
    limit: int
    memory: MemoryPlan
    chosen: bool
    seconds: float
    """Predicted seconds per microbatch that the setting adds to saving everything."""

    @property
    def key(self) -> tuple[str, int, str]:
        """The candidate's record."""
        loss = self.memory.loss_memory
        return self.job, self.limit, f"{self.memory.description}; loss memory {loss}"


def limits(job: Job, device: DeviceFacts, most: int) -> list[int]:
    """Eight limits, geometrically spaced: from the lowest that a search accepts to what the unlimited job needs."""
    persistent = weight_bytes(job) + state_bytes(job) + PROCESS_BYTES[job.device]
    least = (lowest_memory(job, device) + FRAGMENTATION[job.device] - SLACK * persistent) / (1 - SLACK)
    most = max(most, round(least))
    dynamic = [x - persistent for x in (1.002 * least, 1.04 * most)]
    ratio = dynamic[1] / dynamic[0]
    return [round(persistent + dynamic[0] * ratio ** (i / (LIMITS - 1))) for i in range(LIMITS)]


def fitting(job: Job, device: DeviceFacts, limit: int, chosen: MemoryPlan) -> list[MemorySetting]:
    """For each pair of policies and number of tiles, the setting that fits with the most layers of the faster policy;
    the fastest by prediction first. The loss has the chosen setting's memory, or all that it can use."""
    found: dict[Any, MemorySetting] = {}
    variants = [
        (tiles, chosen.loss_memory) for tiles in sorted({1, 2, chosen.mlp_tiles, 2 * chosen.mlp_tiles})
    ]
    if chosen.loss_memory != job.loss_memory:
        variants.append((chosen.mlp_tiles, job.loss_memory))
    for tiles, loss_memory in variants:
        variant = job.changed(loss_memory=loss_memory)
        for faster, slower in combinations(POLICIES, 2):
            if faster in OFFLOADING:
                continue  # an assignment has one offloading policy at most
            best = most_layers(variant, device, limit, (faster, slower), tiles)
            if best is not None:
                best = add_dequantized_copies(variant, best, limit)
                found[best.policies, best.mlp_tiles, best.loss_memory] = best
    return sorted(found.values(), key=lambda setting: (-setting.dequantized_layers, setting.seconds))


def most_layers(
    job: Job, device: DeviceFacts, limit: int, pair: tuple[str, str], tiles: int
) -> MemorySetting | None:
    """The setting with as many layers of the first policy as fit, and the others with the second; None if none fits."""
    L = job.shape.num_layers

    def setting(count: int) -> MemorySetting | None:
        policies = sort_policies({pair[0]: count, pair[1]: L - count})
        found, fits = find_setting_with_policies(job, device, limit, policies, tiles=tiles, fixed_loss=True)
        return found if fits else None

    best, low, high = setting(0), 1, L
    while best is not None and low <= high:
        count = (low + high) // 2
        fits = setting(count)
        best, low, high = (fits, count + 1, high) if fits else (best, low, count - 1)
    return best


def candidates(
    recipe: dict[str, Any], unlimited: Prepared, name: str, others: int, limit: int
) -> list[Candidate]:
    """The chosen setting of a limit, and the others that are measured."""
    device, job = unlimited.device, unlimited.plan.job.changed(dequantized_layers=0)
    limited = build_recipe(recipe | {"memory_limit": f"{limit}B"})
    chosen = prepare(limited, device=device).resolved.memory_plan
    variant = job.changed(mlp_tiles=chosen.mlp_tiles, loss_memory=chosen.loss_memory)
    predicted = make_setting(variant, device, segments_of(chosen.recompute))
    first = Candidate(name, limit, chosen, True, predicted.seconds)
    alternatives = (
        Candidate(
            name,
            limit,
            replace(
                chosen,
                recompute=setting.policies,
                mlp_tiles=setting.mlp_tiles,
                loss_memory=setting.loss_memory,
                dequantized_layers=setting.dequantized_layers,
            ),
            False,
            setting.seconds,
        )
        for setting in fitting(job, device, limit, chosen)
    )
    return [first, *[one for one in alternatives if one.key != first.key][:others]]


@dataclass(frozen=True)
class Measured:
    """A job whose settings are measured."""

    model: Model
    recipe: dict[str, Any]
    folder: Path
    unlimited: Prepared
    """Prepared without a memory limit."""
    candidates: list[Candidate]


def is_long(prepared: Prepared) -> bool:
    """Whether a step takes so long that few are measured, by prediction."""
    step = prepared.plan.time.step
    return step is not None and step.seconds > LONG_S


def plan_jobs(models: list[Model], root: Path, device: str, others: int) -> list[Measured]:
    """The jobs with their settings, all limits planned at the same time in one process per core."""
    jobs = []
    for model in models:
        folder = world.model_folder(root, model.model, device)
        recipe = recipe_of(model, folder, world.adapter_folder(root, model.model), device, None)
        jobs.append((model, recipe, folder, prepare(build_recipe(recipe))))
    if not jobs:
        return []
    # Unlike multiprocessing's own pool, this one raises if one of its processes is killed.
    processes, spawn = min(host_cores(), LIMITS * len(jobs)), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn) as pool:
        waiting = []
        for model, recipe, folder, unlimited in jobs:
            number = (others + 1) // 2 if is_long(unlimited) else others
            call = functools.partial(candidates, recipe, unlimited, model.name, number)
            job = unlimited.plan.job.changed(dequantized_layers=0)
            every = limits(job, unlimited.device, unlimited.plan.memory.needed)
            waiting.append((model, recipe, folder, unlimited, pool.map(call, every)))
        return [
            Measured(model, recipe, folder, unlimited, [one for found in results for one in found])
            for model, recipe, folder, unlimited, results in waiting
        ]


class Loaded:
    """The job's model on its device, which runs with any setting."""

    def __init__(self, model: Model, prepared: Prepared, folder: Path) -> None:
        tokens = world.make_tokens(model)
        self.prepared = prepared
        self.batch = Batch(
            tokens.ids_BT,
            tokens.labels_BT,
            tokens.positions_BT,
            tokens.documents_BT,
            tokens.num_targets,
            [["benchmark"]] * len(tokens.ids_BT),
        )
        self.cuda = prepared.resolved.device.startswith("cuda")
        self.is_long = is_long(prepared)
        self.decoder = build_step(prepared, folder, self.batch).decoder
        self._free()

    def measure(self, candidate: Candidate) -> dict[str, Any]:
        """Median and all times of steps under the candidate's limit, and the peak of allocated memory."""
        memory, resolved = candidate.memory, self.prepared.resolved
        if self.is_long:
            resolved = replace(resolved, graphs=CudaGraphsConfig(False, "steps are long"))
        recompute.apply(self.decoder, memory.recompute, mlp_tiles=memory.mlp_tiles)
        self.decoder.loss_memory = memory.loss_memory
        if resolved.quantization is not None:
            set_dequantized_copies(
                self.decoder, memory.dequantized_layers, dtype=torch_dtype(resolved.precision.dtype)
            )
        self._free()
        self._cap(candidate.limit - BYTES_OUTSIDE_ALLOCATOR["cuda"])
        prepared = replace(self.prepared, resolved=replace(resolved, memory=memory))
        try:
            step = build_step_of(self.decoder, prepared, self.batch)
            times = self._times(step, warm_up=3 if resolved.graphs.enabled else 1)
            peak = torch.cuda.max_memory_allocated() if self.cuda else None
        except torch.OutOfMemoryError:
            return {"failed": "out of memory"}
        finally:
            step = None
            self.decoder.zero_grad(set_to_none=True)
            self._cap(None)
            self._free()
        return {
            "median_ms": 1e3 * statistics.median(times),
            "times_ms": [round(1e3 * seconds, 3) for seconds in times],
            "peak_bytes": peak,
        }

    def _times(self, step: Any, warm_up: int) -> list[float]:
        """Seconds of steps after `warm_up` others; a graph is captured at the third step."""
        device, times = self.prepared.resolved.device, []
        for _ in range(warm_up):
            time_once(step, device)
        until = time.perf_counter() + BUDGET_S
        while len(times) < FEWEST or (len(times) < MOST and time.perf_counter() < until):
            times.append(time_once(step, device))
        return times

    def _cap(self, size: int | None) -> None:
        if self.cuda:
            total = torch.cuda.mem_get_info()[1]
            torch.cuda.set_per_process_memory_fraction(1.0 if size is None else min(1.0, size / total))

    def _free(self) -> None:
        gc.collect()
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def run(options: argparse.Namespace) -> int:
    """Measure what has no record; returns 0 if everything has one."""
    device = "cpu" if options.tiny else "cuda"
    where, until, left = provenance(device, commit=options.commit), time.monotonic() + options.seconds, 0
    models = [
        model
        for model in (TINY if options.tiny else JOBS)
        if any(text in model.name for text in options.only or [""])
    ]
    for job in plan_jobs(models, options.weights.expanduser(), device, options.others):
        known = read_records(options.out, "job", "limit", "setting")
        missing = [one for one in job.candidates if known.get(one.key, {}).get("commit") != where["commit"]]
        wanted = missing and time.monotonic() < until
        loaded = Loaded(job.model, job.unlimited, job.folder) if wanted else None
        for one in missing:
            if loaded is None or time.monotonic() > until:
                left += 1
                continue
            record = dict(zip(("job", "limit", "setting"), one.key, strict=True))
            record |= {"chosen": one.chosen, "predicted_added_ms": 1e3 * one.seconds}
            record |= {**loaded.measure(one), **where}
            append_record(options.out, record)
            print(_line(record), file=sys.stderr, flush=True)
        loaded = None
        gc.collect()
    if left:
        print(f"{left} settings remain; the same command continues", file=sys.stderr)
    return int(left > 0)


def _line(record: dict[str, Any]) -> str:
    ms = f"{record['median_ms']:.1f} ms" if "median_ms" in record else record["failed"]
    return f"{record['job']} {record['limit'] / 2**30:.2f} GiB {record['setting']}: {ms}"


def of_one_commit(records: Iterable[dict[str, Any]], commit: str | None) -> list[dict[str, Any]]:
    """The records of a commit, by default the one that was measured last: what another one chose may differ.

    Example:
        >>> first, second = {"commit": "abc", "time": "2026-01-01"}, {"commit": "def", "time": "2026-01-02"}
        >>> of_one_commit([second, first], None) == [second]
        True
    """
    every = list(records)
    if commit is None and every:
        commit = max(every, key=lambda one: one["time"])["commit"]
    return [one for one in every if one["commit"] == commit]


def verdicts(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each job and limit: the chosen setting, the fastest other one that ran, and the ratio of their times."""
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for record in records:
        groups.setdefault((record["job"], record["limit"]), []).append(record)
    found = []
    for (job, limit), group in groups.items():
        chosen = next((one for one in group if one["chosen"]), None)
        ran = [one for one in group if not one["chosen"] and "median_ms" in one]
        best = min(ran, key=lambda one: one["median_ms"], default=None)
        ratio = chosen["median_ms"] / best["median_ms"] if best and chosen and "median_ms" in chosen else None
        found.append(
            {"job": job, "limit": limit, "chosen": chosen, "best": best, "ratio": ratio, "others": len(ran)}
        )
    return found


def table(found: list[dict[str, Any]]) -> str:
    """One row per job and limit."""
    rows = [["job", "limit, GiB", "chosen", "ms", "fastest other setting that fits", "ms", "ratio", "others"]]
    for one in found:
        chosen, best = one["chosen"] or {}, one["best"] or {}
        rows.append(
            [
                one["job"],
                f"{one['limit'] / 2**30:.2f}",
                chosen.get("setting", "–"),
                f"{chosen['median_ms']:.1f}" if "median_ms" in chosen else chosen.get("failed", "–"),
                best.get("setting", "–"),
                f"{best['median_ms']:.1f}" if best else "–",
                "–" if one["ratio"] is None else f"{one['ratio']:.3f}",
                str(one["others"]),
            ]
        )
    return aligned_table(rows)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.chosen_settings", description=(__doc__ or "").splitlines()[0]
    )
    made.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="jobs whose name contains the text"
    )
    made.add_argument("--others", type=int, default=4, help="other settings per limit")
    made.add_argument("--seconds", type=float, default=1e9, help="approximate time of the command")
    made.add_argument("--out", type=Path, help="data (benchmarks/results/chosen-settings-<device>.jsonl)")
    made.add_argument("--weights", type=Path, default=Path("~/.cache/trimtab/benchmarks"))
    made.add_argument("--commit", default=None, help="the measured commit, if this is no git checkout")
    made.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    made.add_argument("--table", type=Path, metavar="FILE", help="print the table of a file and exit")
    return made


def main(words: list[str] | None = None) -> int:
    """Returns 0 if all settings were measured and no chosen one is beaten by more than 5 %; 2 without a GPU."""
    options = parser().parse_args(words)
    unfinished = 0
    if options.table:
        options.out = options.table
    else:
        if not options.tiny and not torch.cuda.is_available():
            print("error: torch finds no CUDA device; --tiny runs a tiny model on the CPU", file=sys.stderr)
            return 2
        options.commit = options.commit or checkout_commit()
        name = "cpu" if options.tiny else file_name(torch.cuda.get_device_name())
        options.out = options.out or RESULTS / f"chosen-settings-{name}.jsonl"
        unfinished = run(options)
    found = verdicts(
        of_one_commit(read_records(options.out, "job", "limit", "setting").values(), options.commit)
    )
    print(table(found), end="")
    beaten = [one for one in found if one["ratio"] is not None and one["ratio"] > BEATEN]
    unmeasured = [one for one in found if one["ratio"] is None]
    print(
        f"{len(found)} limits, {len(beaten)} with a setting that is more than 5 % faster, {len(unmeasured)} unmeasured"
    )
    return int(unfinished or bool(beaten or unmeasured))


if __name__ == "__main__":
    sys.exit(main())
