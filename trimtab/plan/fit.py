"""Whether a run fits the device, and which changes of the recipe would make it fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from trimtab.adapt import spec_quantized
from trimtab.adapt.spec import LoraSettings
from trimtab.adapt.spec_quantized import Quantization
from trimtab.facts.devices import DeviceFacts
from trimtab.facts.errors import RecipeError, ResourceError
from trimtab.facts.units import format_bytes
from trimtab.kernels.adamw8bit.choice import choose_adamw8bit
from trimtab.plan.job import Job
from trimtab.plan.make import Plan
from trimtab.plan.memory import predict
from trimtab.plan.memory_search import tile_counts
from trimtab.recipe.keys import Recipe
from trimtab.recipe.resume import CHANGEABLE_ON_RESUME

SHORTEST = 256
"""Shorter windows are not suggested."""


@dataclass(frozen=True)
class Remedy:
    """A change of the recipe, what the run then needs, and what that saves, in bytes."""

    change: str
    needed: int
    saving: int


def check_fits(plan: Plan, device: DeviceFacts | None = None, *, resumed: bool = False) -> None:
    """Raise a ResourceError if the plan needs more memory than there is, or than it is allowed; return if it fits.

    The error names what is needed and what is there, and the changes of the recipe, each with its computed
    saving, that are enough; where no single one is, those that are together. For a run that is `resumed`, only
    changes that it may see.
    """
    device = device or plan.device
    there = min(device.available_bytes, plan.limit)
    _check_host(plan, device)
    if plan.memory.needed <= there:
        return
    remedy = _for_a_resumed_run(plan, device, there) if resumed else _for_a_new_run(plan, there)
    raise ResourceError(f"training needs {_needs(plan)} and {_has(plan, device, there)}", remedy)


def _for_a_new_run(plan: Plan, there: int) -> str:
    enough = [remedy for remedy in remedies(plan) if remedy.needed <= there]
    if enough:
        return "set " + ", or ".join(_sentence(one) for one in enough[:3])
    together, fits = _together(plan, there)
    listed = ", and ".join(_sentence(one) for one in together)
    if fits:
        return f"set {listed}: together {format_bytes(together[-1].needed)}"
    if together:
        return (
            f"take a smaller model or a larger device: even {listed} leave "
            f"{format_bytes(together[-1].needed)}"
        )
    return "take a smaller model or a larger device"


def _for_a_resumed_run(plan: Plan, device: DeviceFacts, there: int) -> str:
    """A run that has begun goes on with the same batch, formats and optimizer: what is left is what layers keep."""
    may = [remedy for remedy in remedies(plan) if remedy.change.split(":")[0] in CHANGEABLE_ON_RESUME]
    enough = [remedy for remedy in may if remedy.needed <= there]
    if enough:
        return "set " + ", or ".join(_sentence(one) for one in enough)
    smallest = min(may, key=lambda remedy: remedy.needed, default=None)
    least, first = plan.memory.needed, ""
    if smallest is not None:
        least, first = smallest.needed, f"set {smallest.change} and "
    how = "raise memory_limit to" if least <= device.available_bytes else "continue on a device with"
    return f"{first}{how} {format_bytes(least, up=True)}: a run that has begun cannot do with less"


def _needs(plan: Plan) -> str:
    """What the run needs, and, where nothing was named, that no other setting needs less."""
    peak = f"{format_bytes(plan.memory.needed, up=True)} at its peak ({plan.memory.moment.describe()})"
    auto = plan.recipe.recompute == "auto" and plan.recipe.gradient_checkpointing is None
    if not auto or set(plan.job.layers) & {"none", "pointwise", "selective"}:
        return peak
    return f"at least {peak}, with recompute: {plan.resolved.memory_plan.description},"


def _has(plan: Plan, device: DeviceFacts, there: int) -> str:
    if there < device.available_bytes:
        return f"memory_limit: {plan.recipe.memory_limit} allows {format_bytes(there)}"
    return f"{device.name} has {format_bytes(there)} free"


def _check_host(plan: Plan, device: DeviceFacts) -> None:
    free, pinnable = device.host_free_bytes, device.pinnable_bytes
    if free is None or pinnable is None or plan.memory.host <= pinnable:
        return
    raise ResourceError(
        f"recompute: offload keeps {format_bytes(plan.memory.host)} in the host's memory, of which "
        f"{format_bytes(free)} are free and {format_bytes(pinnable)} may be pinned",
        "set recompute: auto, or fewer layers to offload, or a shorter max_seq_length",
    )


def remedies(plan: Plan) -> list[Remedy]:
    """Every single change that saves memory; those first that leave what is computed as it is."""
    return [remedy for _, remedy in _variants(plan, plan.job) if remedy.saving > 0]


def _sentence(remedy: Remedy) -> str:
    return f"{remedy.change} (saves {format_bytes(remedy.saving)})"


def _variants(plan: Plan, job: Job) -> Iterator[tuple[Job, Remedy]]:
    now = predict(job).needed
    for changed, words in _changes(job, plan.device, plan.recipe):
        if plan.recipe.mlp_tiles == "auto":  # fewer tokens are cut into fewer tiles
            changed = changed.changed(mlp_tiles=min(changed.mlp_tiles, max(tile_counts(changed, None))))
        needed = predict(changed).needed
        yield changed, Remedy(words, needed, now - needed)


def _changes(job: Job, device: DeviceFacts, recipe: Recipe) -> Iterator[tuple[Job, str]]:
    """(changed job, the recipe's words for it), as far as the recipe's other keys let it be changed."""
    if job.batch > 1 and not job.in_backward:
        batch = job.batch // 2 if job.batch % 2 == 0 else 1
        accumulation = job.accumulation * job.batch // batch
        yield (
            dataclasses.replace(job, batch=batch, accumulation=accumulation),
            f"per_device_train_batch_size: {batch} with gradient_accumulation_steps: {accumulation}",
        )
    if job.unpacked_layers:
        yield dataclasses.replace(job, unpacked_layers=0), "unpacked_layers: 0"
    thrifty = {"cuda": ("block", "offload"), "cpu": ("block",)}[job.device]
    for policy in thrifty[thrifty.index(job.layers[0]) + 1 if job.layers[0] in thrifty else 0 :]:
        yield dataclasses.replace(job, policies=(policy,) * len(job.layers)), f"recompute: {policy}"
    if job.optimizer != "adamw_8bit":
        impl = choose_adamw8bit(device=device.kind, triton=device.runs_triton, requested="auto").impl
        yield dataclasses.replace(job, optimizer="adamw_8bit", optimizer_impl=impl), "optim: adamw_8bit"
    if job.weights_dtype == "fp32" and job.bf16:
        yield dataclasses.replace(job, dtype="bf16", weights_dtype="bf16"), "dtype: bf16, weights_dtype: bf16"
    if job.weights_dtype == "bf16" and job.gradient_dtype == "fp32":
        yield dataclasses.replace(job, gradient_dtype="bf16"), "gradient_dtype: bf16"
    if job.lora is not None and job.quantization is None and _can_be_packed(job):
        yield dataclasses.replace(job, quantization=_nf4(device)), "load_in_4bit: true"
    if job.tokens >= 2 * SHORTEST:
        yield dataclasses.replace(job, tokens=job.tokens // 2), f"max_seq_length: {job.tokens // 2}"
    # Last, since it trains something else.
    narrow = min(min(linear.out_features, linear.in_features) for _, linear in job.shape.linears())
    free = not job.in_backward and recipe.embedding_learning_rate is None
    if job.lora is None and free and narrow >= LoraSettings().r:
        yield dataclasses.replace(job, lora=LoraSettings()), "lora: {r: 16}, which trains adapters only"


def _can_be_packed(job: Job) -> bool:
    """Whether no linear layer of the blocks is trained whole."""
    try:
        spec_quantized.check_whole(job.shape, (parameter.name for parameter in job.trained.parameters))
    except RecipeError:
        return False
    return True


def _nf4(device: DeviceFacts) -> Quantization:
    impl = spec_quantized.choose_quantized_kernels(device=device.kind, triton=device.runs_triton).impl
    return Quantization("nf4", double=True, impl=impl)


def _together(plan: Plan, there: int) -> tuple[list[Remedy], bool]:
    """Changes piled up in their order until the run fits, and whether it does."""
    job = plan.job
    steps: list[Remedy] = []
    while True:
        options = [(changed, remedy) for changed, remedy in _variants(plan, job) if remedy.saving > 0]
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
