"""Predictions of the plan for a profiled step, in the terms of the measurement."""

from __future__ import annotations

from collections.abc import Mapping

from trimtab.facts.dtypes import TORCH_NAMES
from trimtab.facts.operations import OperationKind
from trimtab.lab.operation_times import ADDITIONS
from trimtab.lab.profile_result import Ceiling, OperationRow, PredictedPeak, PredictedStep, ProfiledJob
from trimtab.lab.timing import Ceilings
from trimtab.plan.make import Plan
from trimtab.plan.memory import CUBLAS_BYTES
from trimtab.plan.step_time import UPDATE
from trimtab.plan.time import flops_per_token


def profiled_job(plan: Plan) -> ProfiledJob:
    """The recipe's settings with every `auto` resolved."""
    job, resolved = plan.job, plan.resolved
    settings = {
        "device": plan.device.name,
        "training": _method(plan),
        "dtypes": f"products {job.dtype}, weights {job.weights_dtype}, gradients {job.gradient_dtype}",
        "attention": ", ".join(dict.fromkeys(job.attention_backends)),
        "loss": job.loss_impl,
        "optimizer": f"{job.optimizer}{' inside the backward pass' if job.in_backward else ''}",
        "recompute": resolved.memory_plan.description,
        "torch.compile": "on" if resolved.compile.enabled else "off",
        "CUDA graphs": "on" if resolved.graphs.enabled else "off",
        "sequences": f"{job.batch} × {job.tokens} tokens{', packed' if job.packed else ''}, "
        f"{job.accumulation} {'microbatch' if job.accumulation == 1 else 'microbatches'} per step",
    }
    return ProfiledJob(
        plan.recipe.model.name,
        plan.shape.num_parameters,
        job.trained.count,
        job.batch,
        job.tokens,
        job.accumulation,
        job.packed,
        job.dtype,
        settings,
    )


def _method(plan: Plan) -> str:
    job = plan.job
    if job.lora is None:
        return "all weights"
    base = f" on {job.quantization.kind.upper()} weights" if job.quantization is not None else ""
    return f"LoRA, rank {job.lora.r}{base}"


def model_flops(plan: Plan) -> float:
    """FLOPs of an optimizer step's forward and backward passes, without recomputation."""
    job = plan.job.changed(policies=("none",) * plan.shape.num_layers, mlp_tiles=1)
    return flops_per_token(job) * job.batch * job.tokens * job.accumulation


def ceiling_of(plan: Plan, measured: Ceilings | None) -> Ceiling:
    """The device's peak rate: from its data sheet, or measured with a large product."""
    known = plan.device.ceiling(plan.job.dtype)
    if known is not None:
        return Ceiling(*known, dtype=plan.job.dtype, is_data_sheet=True)
    assert measured is not None, "a device without a data sheet is measured"
    names = {theirs: name for name, theirs in TORCH_NAMES.items()}
    dtype = names.get(measured.matmul_dtype, measured.matmul_dtype)
    source = f"measured with a large {dtype} product"
    return Ceiling(measured.matmul_flops_per_s, source, dtype, is_data_sheet=False)


def predicted_step(plan: Plan) -> PredictedStep | None:
    """Predicted time of an optimizer step; None if the device's rates are unknown."""
    step = plan.time.step
    if step is None:
        return None
    update = sum(operation.total for operation in step.operations if operation.phase == UPDATE)
    return PredictedStep(step.seconds, step.low_seconds, step.high_seconds, update, step.basis)


def predicted_peak(plan: Plan) -> PredictedPeak:
    """Predicted memory at the peak of a step.

    On a GPU cuBLAS's workspaces, which torch's allocator counts as allocated, belong to the bucket `other`.
    """
    buckets, workspaces = plan.memory.peak.to_dict(), CUBLAS_BYTES[plan.job.device]
    total = buckets.pop("total") + workspaces
    return PredictedPeak(
        buckets | {"other": buckets["other"] + workspaces},
        total,
        plan.memory.moment.describe(),
        plan.memory.process_bytes - workspaces,
        min(plan.limit, plan.device.available_bytes),
    )


def operation_rows(
    measured: Mapping[str, tuple[float, float, float]], plan: Plan
) -> tuple[OperationRow, ...]:
    """Measured seconds of each operation in one microbatch next to the plan's, the longest first.

    Args:
        measured: seconds of forward, recomputation and backward by operation.
        plan: the plan of the same job.
    """
    predicted = _predicted(plan)
    rows = [OperationRow(name, *seconds, predicted.pop(name, None)) for name, seconds in measured.items()]
    rows += [OperationRow(name, 0.0, 0.0, 0.0, seconds) for name, seconds in predicted.items() if seconds > 0]
    return tuple(sorted(rows, key=lambda row: -max(row.measured, row.predicted or 0.0)))


def _predicted(plan: Plan) -> dict[str, float]:
    """Predicted seconds of each operation in one microbatch; empty if the device's rates are unknown."""
    seconds_by_name: dict[str, float] = {}
    for operation in plan.time.step.operations if plan.time.step is not None else ():
        if operation.phase == UPDATE:
            continue
        name = (
            ADDITIONS
            if operation.kind is OperationKind.ADD and operation.name.endswith(".grad")
            else operation.name
        )
        seconds_by_name[name] = seconds_by_name.get(name, 0.0) + operation.total / plan.job.accumulation
    return seconds_by_name
