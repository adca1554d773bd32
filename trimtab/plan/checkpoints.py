"""Checkpoints of a run: when they are saved, their disk space, and the memory from which they are written. No torch."""

from __future__ import annotations

from trimtab.checkpoint import spec as checkpoint_spec
from trimtab.data import spec as data_spec
from trimtab.facts.dtypes import nbytes
from trimtab.plan import disk as plan_disk
from trimtab.plan.disk import Disk, SaveSchedule
from trimtab.plan.job import Job
from trimtab.plan.memory import BYTES_OUTSIDE_ALLOCATOR, PROCESS_BYTES, state_bytes
from trimtab.recipe.keys import Recipe
from trimtab.recipe.rules import has_domain_set


def checkpoint_disk(recipe: Recipe, job: Job, steps: int | None) -> Disk:
    """Returns the disk space of a run's checkpoints.

    Args:
        recipe: when it saves, and how many checkpoints it keeps.
        job: what it trains.
        steps: optimizer steps of the run; None if not known yet.
    """
    num_tensors = 3 * len(job.trained.parameters)  # a weight and two moments; 8-bit scales are small
    saving = save_schedule(recipe, steps)
    return plan_disk.estimate(job.trained.trainable_bytes, state_bytes(job), num_tensors, saving)


def save_schedule(recipe: Recipe, steps: int | None) -> SaveSchedule:
    """When a recipe saves checkpoints: every `save_steps`, and with an evaluation set also after evaluations that
    improve (`best`).

    Example:
        >>> from trimtab.recipe import loads
        >>> save_schedule(loads("model: a\\ndata: {train: x}\\nsave_steps: null"), 100).saves
        1
    """
    measured = has_domain_set(recipe) or bool(recipe.data.eval.general)
    best = recipe.eval_steps if measured else None
    return SaveSchedule(recipe.save_total_limit, recipe.save_steps, best, steps)


def copy_bytes(job: Job, disk: Disk) -> int:
    """Returns the host memory for writing a checkpoint: a copy of the state, and buffers of two of its files."""
    largest = max(nbytes(parameter.dtype, parameter.count) for parameter in job.trained.parameters)
    return checkpoint_spec.host_bytes(disk.checkpoint_bytes, largest)


def background_bytes(job: Job, disk: Disk) -> int:
    """Returns what checkpoints add on a CPU to the memory of a training step, because a thread writes them while
    training continues; 0 on a GPU, and if only the end of the run is saved."""
    if job.device != "cpu" or disk.saving.saves == 1:
        return 0
    batches = data_spec.batch_bytes(job.batch, job.tokens) * job.accumulation
    return copy_bytes(job, disk) + batches + BYTES_OUTSIDE_ALLOCATOR["cpu"] - PROCESS_BYTES["cpu"]
