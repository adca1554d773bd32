"""Whether forward and backward are recorded as CUDA graphs (`trimtab.trainer.graphs`), and why."""

from __future__ import annotations

from typing import Any

from trimtab.facts.devices import DeviceFacts
from trimtab.facts.errors import RecipeError
from trimtab.plan import Plan

WORTH_SECONDS = 2.0
"""A microbatch whose arithmetic takes longer keeps the GPU busy while the host hands over the next kernels: those of
an 8B model with adapters, its layers computed again, took 0.9 s (7700 of them, beside an H200)."""


def choose_graphs(plan: Plan) -> dict[str, Any]:
    """{"on", "reason"} for a plan whose other choices are made; RecipeError where the recipe asks for what cannot be.

    The numbers are the same either way, so that a resumed run may decide anew.
    """
    recipe, choices = plan.recipe, plan.choices
    obstacle = _obstacle(plan, choices, recipe.optim_in_backward)
    if recipe.cuda_graphs is True:
        if obstacle is not None:
            raise RecipeError(f"cuda_graphs: true cannot work here: {obstacle}", "set cuda_graphs: auto")
        return {"on": True, "reason": "named in the recipe"}
    if recipe.cuda_graphs is False:
        return {"on": False, "reason": "named in the recipe"}
    if obstacle is not None:
        return {"on": False, "reason": obstacle}
    seconds = _seconds(plan, plan.device)
    if seconds is not None and seconds > WORTH_SECONDS:
        reason = (
            f"a microbatch takes {seconds:.1f} s at least, beside which handing over kernels costs nothing"
        )
        return {"on": False, "reason": reason}
    return {"on": True, "reason": "forward and backward of a microbatch in one launch"}


def _obstacle(plan: Plan, choices: dict[str, Any], in_backward: bool) -> str | None:
    attention = choices["attention"]["impl"]
    if plan.device.kind != "cuda":
        return "they are CUDA's"
    if plan.num_devices > 1:
        return "several devices"
    if in_backward:
        return "an optimizer in backward takes numbers from the host"
    if plan.recipe.group_by_length:
        return "group_by_length makes microbatches of many lengths, and a graph has one"
    if plan.recipe.packing and attention in ("varlen", "flex"):
        return f"{attention} attention reads tensors whose size depends on the documents"
    return None


def _seconds(plan: Plan, device: DeviceFacts) -> float | None:
    """Of a microbatch's arithmetic at the device's ceiling; None where that is unknown."""
    ceiling = device.ceiling(plan.job.dtype)
    if ceiling is None:
        return None
    return plan.time.flops_per_token * plan.job.batch * plan.job.tokens / ceiling[0]
