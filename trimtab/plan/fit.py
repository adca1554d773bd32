"""Whether a run fits the device, and which changes of the recipe would make it fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from trimtab.facts.devices import DeviceFacts
from trimtab.facts.errors import ResourceError
from trimtab.facts.units import format_bytes
from trimtab.plan.make import Plan
from trimtab.plan.memory import Job, predict

SHORTEST = 256
"""Shorter windows are not suggested."""


@dataclass(frozen=True)
class Remedy:
    """A change of the recipe, what the run then needs, and what that saves, in bytes."""

    change: str
    needed: int
    saving: int


def check_fits(plan: Plan, device: DeviceFacts | None = None) -> None:
    """Raise a ResourceError if the plan needs more memory than the device has free; return if it fits.

    The error names what is needed and what is there, and the changes of the recipe, each with its computed
    saving, that are enough; where no single one is, those that are together.
    """
    device = device or plan.device
    needed, there = plan.memory.needed, device.available_bytes
    if needed <= there:
        return
    singles = remedies(plan)
    enough = [remedy for remedy in singles if remedy.needed <= there]
    if enough:
        remedy = "set " + ", or ".join(_sentence(one) for one in enough[:3])
    else:
        together, fits = _together(plan, there)
        listed = ", and ".join(_sentence(one) for one in together)
        if fits:
            remedy = f"set {listed}: together {format_bytes(together[-1].needed)}"
        elif together:
            remedy = (
                f"take a smaller model or a larger device: even {listed} leave "
                f"{format_bytes(together[-1].needed)}"
            )
        else:
            remedy = "take a smaller model or a larger device"
    raise ResourceError(
        f"training needs {format_bytes(needed)} at its peak ({plan.memory.moment}) and {device.name} has "
        f"{format_bytes(there)} free",
        remedy,
    )


def remedies(plan: Plan) -> list[Remedy]:
    """Every single change that saves memory; those first that leave what is computed as it is."""
    return [remedy for _, remedy in _variants(plan.job) if remedy.saving > 0]


def _sentence(remedy: Remedy) -> str:
    return f"{remedy.change} (saves {format_bytes(remedy.saving)})"


def _variants(job: Job) -> Iterator[tuple[Job, Remedy]]:
    now = predict(job).needed
    for changed, words in _changes(job):
        needed = predict(changed).needed
        yield changed, Remedy(words, needed, now - needed)


def _changes(job: Job) -> Iterator[tuple[Job, str]]:
    """(changed job, the recipe's words for it)."""
    if job.batch > 1:
        batch = job.batch // 2 if job.batch % 2 == 0 else 1
        accumulation = job.accumulation * job.batch // batch
        yield (
            dataclasses.replace(job, batch=batch, accumulation=accumulation),
            f"per_device_train_batch_size: {batch} with gradient_accumulation_steps: {accumulation}",
        )
    if not job.recompute:
        yield dataclasses.replace(job, recompute=True), "gradient_checkpointing: true"
    if job.optimizer != "adamw_8bit":
        yield dataclasses.replace(job, optimizer="adamw_8bit"), "optim: adamw_8bit"
    if job.weights_dtype == "fp32" and job.bf16:
        yield dataclasses.replace(job, dtype="bf16", weights_dtype="bf16"), "dtype: bf16, weights_dtype: bf16"
    if job.weights_dtype == "bf16" and job.gradient_dtype == "fp32":
        yield dataclasses.replace(job, gradient_dtype="bf16"), "gradient_dtype: bf16"
    if job.tokens >= 2 * SHORTEST:
        yield dataclasses.replace(job, tokens=job.tokens // 2), f"max_seq_length: {job.tokens // 2}"


def _together(plan: Plan, there: int) -> tuple[list[Remedy], bool]:
    """Changes piled up in their order until the run fits, and whether it does."""
    job = plan.job
    steps: list[Remedy] = []
    while True:
        options = [(changed, remedy) for changed, remedy in _variants(job) if remedy.saving > 0]
        if not options:
            return steps, False
        job, step = options[0]
        key = step.change.split(":")[0]
        if steps and steps[-1].change.split(":")[0] == key:
            # The same key once more: only where it ends is worth saying, and what it saved in all.
            step = dataclasses.replace(step, saving=step.saving + steps.pop().saving)
        steps.append(step)
        if step.needed <= there:
            return steps, True
