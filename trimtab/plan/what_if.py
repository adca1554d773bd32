"""What each technique would save in memory and cost in time, for one plan. Imports no torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from trimtab.facts.devices import DeviceFacts
from trimtab.plan.changes import Change, reversals, savings
from trimtab.plan.job import Job
from trimtab.plan.make import Plan
from trimtab.plan.memory import predict
from trimtab.plan.memory_search import tile_counts
from trimtab.plan.step_time import step_time

WORTH_BYTES = 2**20
"""Changes that move less memory than this and no time are not listed."""


@dataclass(frozen=True)
class Effect:
    """One change of the recipe, everything else as planned, and what follows from it."""

    change: Change
    needed: int
    """Bytes on the device at the peak after the change, the process itself included."""
    saved: int
    """Bytes that the peak has less; negative where it has more."""
    host: int
    """Bytes of pinned host memory beyond those that the plan takes."""
    seconds: float | None
    """Seconds that an optimizer step takes longer, for as many tokens as a step of the plan has; negative where it is
    faster, None where the device's rates are not known."""

    @property
    def price(self) -> float:
        """Seconds per saved GiB; what only makes a step faster costs least of all."""
        if self.saved <= 0:
            return math.inf
        return (self.seconds or 0.0) / (self.saved / 2**30)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "technique": self.change.name,
            "in_use": self.change.in_use,
            "recipe": dict(self.change.keys),
            "same_training": self.change.same_training,
            "saved": self.saved,
            "needed": self.needed,
            "host": self.host,
            "seconds": self.seconds,
        }


def list_effects(plan: Plan) -> list[Effect]:
    """Every technique that would save memory, the cheapest in seconds per saved GiB first; then those that the plan
    uses already, as what turning each off would take.

    Example:
        >>> from trimtab.facts.devices import DeviceFacts
        >>> from trimtab.facts.shapes import uniform_shape
        >>> from trimtab.plan import make_plan
        >>> from trimtab.plan.resolved import *
        >>> from trimtab.recipe import loads
        >>> tiny = uniform_shape("llama", 512, 64, 128, 2, num_heads=4, num_kv_heads=2, head_dim=16)
        >>> fp32 = PrecisionConfig("fp32", "fp32", "fp32")
        >>> resolved = Resolved("cpu", threads=2, deterministic=False, precision=fp32,
        ...                     attention=AttentionConfig.uniform(2, "sdpa_flash"), memory=MemoryPlan(("none", "none")),
        ...                     optimizer=OptimizerConfig("adamw_torch"))
        >>> plan = make_plan(loads("model: tiny\\ndata: {train: x}"), tiny, resolved,
        ...                  device=DeviceFacts("a laptop", "cpu", memory_bytes=8 * 2**30))
        >>> [effect.change.text for effect in list_effects(plan) if effect.change.keys.get("recompute") == "block"]
        ['recompute: block']
    """
    techniques = [change for change in savings(plan, plan.job) if change.technique]
    useful = [effect for effect in effects(plan, techniques) if effect.saved > WORTH_BYTES or _faster(effect)]
    used = [
        effect
        for effect in effects(plan, reversals(plan))
        if abs(effect.saved) > WORTH_BYTES or effect.seconds
    ]
    useful.sort(key=lambda effect: (effect.price, -effect.saved))
    used.sort(key=lambda effect: effect.saved)
    return [*useful, *used]


def effects(plan: Plan, changes: Iterable[Change], job: Job | None = None) -> list[Effect]:
    """What each change of a job, the plan's unless another is given, leads to."""
    current = plan.job if job is None else job
    memory, before = predict(current), job_seconds(plan, current)
    results = []
    for change in changes:
        changed = _fewer_tiles(plan, change)
        after = predict(changed.job)
        seconds = job_seconds(plan, changed.job)
        cost = None if seconds is None or before is None else seconds - before
        results.append(
            Effect(changed, after.needed, memory.needed - after.needed, after.host - memory.host, cost)
        )
    return results


def job_seconds(plan: Plan, job: Job) -> float | None:
    """Seconds that a job takes for as many tokens as an optimizer step of the plan has; None if not known."""
    graphs = plan.resolved.graphs.enabled and not job.in_backward
    seconds = seconds_per_token(job, plan.device, graphs=graphs)
    reference = plan.job
    return None if seconds is None else seconds * reference.batch * reference.tokens * reference.accumulation


def seconds_per_token(job: Job, device: DeviceFacts, *, graphs: bool) -> float | None:
    """Of a whole optimizer step, padding counted as tokens; None where the device's rates are not known."""
    time = step_time(job, device, graphs=graphs)
    return None if time is None else time.seconds / (job.batch * job.tokens * job.accumulation)


def _fewer_tiles(plan: Plan, change: Change) -> Change:
    """Fewer tokens are cut into fewer tiles, where the recipe leaves their number to the planner."""
    if plan.recipe.mlp_tiles != "auto" or "mlp_tiles" in change.keys:
        return change
    max_tiles = max(tile_counts(change.job, None))
    if change.job.mlp_tiles <= max_tiles:
        return change
    return dataclasses.replace(change, job=change.job.changed(mlp_tiles=max_tiles))


def _faster(effect: Effect) -> bool:
    return effect.saved >= 0 and effect.seconds is not None and effect.seconds < 0
