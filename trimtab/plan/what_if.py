"""What-if analysis: memory saved and time added by each technique, for one plan. Imports no torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from trimtab.facts.devices import DeviceFacts
from trimtab.plan.changes import Change, reversals, savings
from trimtab.plan.graphs import graphs_shortfall
from trimtab.plan.job import Job
from trimtab.plan.make import Plan
from trimtab.plan.memory import predict
from trimtab.plan.memory_search import tile_counts
from trimtab.plan.step_time import step_time

WORTH_BYTES = 2**20
"""Changes of memory below this, and without a change in time, are not listed."""


@dataclass(frozen=True)
class Effect:
    """The effect of one recipe change, with everything else as planned."""

    change: Change
    needed: int
    """Bytes on the device at the peak after the change, including the process itself."""
    saved: int
    """Reduction of the peak in bytes; negative if it increases."""
    host: int
    """Additional bytes of pinned host memory."""
    seconds: float | None
    """Extra seconds of an optimizer step with the plan's number of tokens; negative if it is faster, None if the
    device's rates are unknown."""

    @property
    def price(self) -> float:
        """Seconds per saved GiB; lowest for changes that only make a step faster."""
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
    """Returns the techniques that would save memory, sorted by seconds per saved GiB; then the effect of turning off
    each technique that the plan already uses.

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
    """Returns the effect of each change on a job, by default the plan's."""
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
    """Returns the seconds of a job for the tokens of one optimizer step of the plan; None if unknown."""
    graphs = _captures_graphs(plan, job)
    seconds = seconds_per_token(job, plan.device, graphs=graphs)
    reference = plan.job
    return None if seconds is None else seconds * reference.batch * reference.tokens * reference.accumulation


def _captures_graphs(plan: Plan, job: Job) -> bool:
    """Whether CUDA graphs are captured with a job: as planned, unless it depends on the job's memory."""
    if job.in_backward or job is plan.job or not plan.graphs_depend_on_memory:
        return plan.resolved.graphs.enabled and not job.in_backward
    return graphs_shortfall(job, plan.limit, capped=plan.is_capped) == 0


def seconds_per_token(job: Job, device: DeviceFacts, *, graphs: bool) -> float | None:
    """Returns the seconds per token of an optimizer step, padding included; None if the device's rates are unknown."""
    time = step_time(job, device, graphs=graphs)
    return None if time is None else time.seconds / (job.batch * job.tokens * job.accumulation)


def _fewer_tiles(plan: Plan, change: Change) -> Change:
    """Reduces the number of tiles if the change has fewer tokens and `mlp_tiles` is `auto`."""
    if plan.recipe.mlp_tiles != "auto" or "mlp_tiles" in change.keys:
        return change
    max_tiles = max(tile_counts(change.job, None))
    if change.job.mlp_tiles <= max_tiles:
        return change
    return dataclasses.replace(change, job=change.job.changed(mlp_tiles=max_tiles))


def _faster(effect: Effect) -> bool:
    return effect.saved >= 0 and effect.seconds is not None and effect.seconds < 0
