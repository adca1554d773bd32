"""trimtab's training step, built with the functions that `trimtab train` uses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.end_to_end.jobs import GB, LONGEST_ATTENTION, Case, memory_limit_bytes, recipe_of
from benchmarks.end_to_end.peers import Step
from benchmarks.end_to_end.world import Tokens
from trimtab.adapt.spec_recompute import count_policies
from trimtab.data import Batch
from trimtab.lab.training_step import build_step
from trimtab.plan import find_max_seq_length
from trimtab.plan.memory import PROCESS_BYTES, predict
from trimtab.plan.resolved_json import resolved_to_dict
from trimtab.recipe import build as build_recipe
from trimtab.run.prepare import Prepared, prepare


def prepared_for(
    case: Case,
    folder: Path,
    adapter: Path,
    device: str,
    limit_gib: float | None,
    more: dict[str, Any] | None = None,
) -> Prepared:
    """Prepare a run with every `auto` resolved. `limit_gib` limits the tensors, without the CUDA context; `more` are
    additional recipe keys."""
    limit = None
    if case.cap_gb is not None:
        limit = memory_limit_bytes(case.cap_gb, device)
    elif limit_gib is not None:
        limit = round(limit_gib * 2**30) + PROCESS_BYTES[device]
    recipe = recipe_of(case.job, folder, adapter, device, limit)
    if case.contestant == "trimtab eager":
        recipe |= {"torch_compile": False, "cuda_graphs": False}
    if case.cap_gb is not None and device == "cuda":
        recipe["model"]["attn_implementation"] = LONGEST_ATTENTION
    prepared = prepare(build_recipe(recipe | (more or {})))
    if limit_gib is None:
        return prepared
    # The peers' figures are allocated, not reserved memory; so the allocator gets no cap here either.
    memory = replace(prepared.resolved.memory_plan, allocator_bytes=None)
    return replace(prepared, resolved=replace(prepared.resolved, memory=memory))


def build(
    prepared: Prepared, folder: Path, tokens: Tokens, *, nearest: bool = False
) -> tuple[Step, dict[str, Any]]:
    """Build the training step; returns it with the resolved choices. `nearest` disables stochastic rounding."""
    resolved = prepared.resolved
    batch = Batch(
        tokens.ids_BT,
        tokens.labels_BT,
        tokens.positions_BT,
        tokens.documents_BT,
        tokens.num_targets,
        [["benchmark"]] * len(tokens.ids_BT),
    )
    step = build_step(prepared, folder, batch)
    step.optimizer.stochastic_rounding &= not nearest
    plain = resolved_to_dict(resolved)
    chosen = {
        "load_peak_bytes": step.load_peak_bytes,
        "attention": resolved.attention.packed_backends,
        "compile": plain["compile"],
        "graphs": plain["graphs"],
        "memory": resolved.memory_plan.description,
        "predicted_bytes": prepared.plan.memory.needed,
        "host_bytes": resolved.memory_plan.host_bytes,
        "loss": resolved.loss.impl,
        "pointwise": resolved.pointwise.impl,
    }
    return step, chosen


def longest(case: Case, folder: Path, adapter: Path, device: str) -> int:
    """The longest sequence that fits under the case's cap according to the planner; 0 if none fits."""
    assert case.cap_gb is not None
    short = replace(case, job=replace(case.job, tokens=256))
    prepared = prepared_for(short, folder, adapter, device, None)
    return find_max_seq_length(
        prepared.plan.job, prepared.device, memory_limit_bytes(case.cap_gb, device)
    ).tokens


def part_of(
    case: Case, folders: tuple[Path, Path], adapters: tuple[Path, Path], device: str
) -> tuple[float, dict[str, Any]]:
    """Memory cap (GB) and recipe keys with which a part of the layers runs as in the full model.

    Recompute policies have the same proportions as in the full model, and the cap is reduced by the planned memory of
    the omitted layers. `folders` and `adapters` are those of the full model and of the part.
    """
    assert case.cap_gb is not None
    whole, part = (
        prepared_for(case, *place, device, None).plan for place in zip(folders, adapters, strict=True)
    )
    more = {
        "recompute": proportion(count_policies(whole.job.layer_policies), part.shape.num_layers),
        "mlp_tiles": whole.job.mlp_tiles,
        "dequantized_layers": 0,
    }
    job = prepared_for(case, folders[1], adapters[1], device, None, more).plan.job
    needed = predict(job.changed(loss_memory=whole.job.loss_memory)).needed
    return case.cap_gb - (whole.memory.needed - needed) / GB, more


def proportion(counts: dict[str, int], total: int) -> dict[str, int]:
    """Scale counts to a new total: each policy at least once, the remainder to the most frequent one.

    Example:
        >>> proportion({"offload": 28, "block": 3, "selective": 1}, 8)
        {'offload': 6, 'block': 1, 'selective': 1}
    """
    found = {name: max(1, round(count * total / sum(counts.values()))) for name, count in counts.items()}
    most = max(counts, key=lambda name: counts[name])
    return found | {most: found[most] + total - sum(found.values())}
