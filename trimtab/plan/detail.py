"""A plan as plain data with everything that reports show: whether it fits, activations by part, the memory timeline
of a step, and its time by operation. Imports no torch."""

from __future__ import annotations

from typing import Any

from trimtab.plan.fit import fits, missing_for_graphs
from trimtab.plan.make import Plan
from trimtab.plan.step_time import OperationTime


def detailed_dict(plan: Plan, *, timeline: bool = False) -> dict[str, Any]:
    """Returns `Plan.to_dict` with `fits`, `missing_for_graphs`, `device`, `job`, `operations` and the model's active
    parameters added.

    Args:
        plan: the plan, for any device.
        timeline: whether to add every moment of a step, for a chart; `phases` has only the corner points.

    Example:
        >>> detailed_dict(make_plan(recipe, shape, resolved, device=gpu))["fits"]  # doctest: +SKIP
        True
    """
    job, device = plan.job, plan.device
    plain = plan.to_dict()
    plain["model"] |= {"active": plan.shape.num_active_parameters}
    plain |= {
        "fits": fits(plan),
        "missing_for_graphs": missing_for_graphs(plan),
        "device": {"name": device.name, "kind": device.kind, "memory_bytes": device.memory_bytes},
        "job": {
            "per_device_train_batch_size": job.batch,
            "gradient_accumulation_steps": job.accumulation,
            "max_seq_length": job.tokens,
            "packing": job.packed,
            "method": method_of(plan),
            "layers": job.shape.num_layers,
        },
        "operations": _operations(plan),
    }
    return plain | ({"timeline": [point.to_dict() for point in plan.phases.timeline]} if timeline else {})


def method_of(plan: Plan) -> str:
    """Returns the training method as a value of `--method`."""
    if plan.job.lora is None:
        return "full"
    if plan.job.quantization is None:
        return "lora"
    return {"nf4": "qlora", "int8": "int8"}[plan.job.quantization.kind]


def _operations(plan: Plan) -> list[dict[str, Any]]:
    """Seconds of an optimizer step by operation, the longest first; empty if the device's rates are unknown."""
    time = plan.time.step
    if time is None:
        return []
    totals: dict[tuple[str, str], list[OperationTime]] = {}
    for operation in time.operations:
        totals.setdefault((operation.name, operation.kind.value), []).append(operation)
    rows = []
    for (name, kind), entries in totals.items():
        by_phase: dict[str, float] = {}
        for operation in entries:
            by_phase[operation.phase] = by_phase.get(operation.phase, 0.0) + operation.total
        rows.append({"name": name, "kind": kind, "seconds": sum(by_phase.values()), "phases": by_phase})
    return sorted(rows, key=lambda row: -float(str(row["seconds"])))
