"""Whether a run fits its device, and which recipe changes would make it fit."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.facts.devices import DeviceFacts
from trimtab.facts.errors import ResourceError
from trimtab.facts.phases import STEP_PHASES
from trimtab.facts.units import format_bytes, format_seconds
from trimtab.plan.changes import Change, savings
from trimtab.plan.checkpoints import background_bytes
from trimtab.plan.graphs import graphs_shortfall
from trimtab.plan.job import Job
from trimtab.plan.make import Plan
from trimtab.plan.phases import PHASE_REMEDIES
from trimtab.plan.what_if import effects
from trimtab.recipe.resume import CHANGEABLE_ON_RESUME


@dataclass(frozen=True)
class Remedy:
    """A recipe change, the memory that the run then needs, and the memory saved, in bytes."""

    change: str
    needed: int
    saving: int
    seconds: float | None = None
    """Extra seconds of an optimizer step with the same number of tokens; None if the device's rates are unknown."""


def check_fits(plan: Plan, device: DeviceFacts | None = None, *, resumed: bool = False) -> None:
    """Raise a ResourceError if the plan needs more memory than is available or allowed.

    The error names the needed and the available memory and the recipe changes that suffice, each with its computed
    saving; if no single change suffices, a combination that does. For a `resumed` run, only changes that are allowed
    on resume.
    """
    device = device or plan.device
    available = min(device.available_bytes, plan.limit)
    _check_host(plan, device)
    if _needed(plan) <= available:
        _check_phases(plan, device, available)
        _check_graphs(plan, device, available)
        return
    remedy = _resumed_run_remedy(plan, device, available) if resumed else _new_run_remedy(plan, available)
    weights, has = plan.memory.before.weights, _describe_available(plan, device, available)
    if weights > available:
        raise ResourceError(f"the weights alone take {format_bytes(weights)} and {has}", remedy)
    raise ResourceError(f"training needs {_describe_need(plan)} and {has}", remedy)


def fits(plan: Plan) -> bool:
    """Returns whether the device has enough memory for every phase of the run, and the host for offloading.

    Example:
        >>> fits(make_plan(recipe, shape, resolved, device=gpu))  # doctest: +SKIP
        True
    """
    pinnable = plan.device.pinnable_bytes
    on_host = pinnable is None or plan.memory.host <= pinnable
    available = min(plan.device.available_bytes, plan.limit)
    return on_host and plan.needed <= available and missing_for_graphs(plan) == 0


def _new_run_remedy(plan: Plan, available: int) -> str:
    sufficient = _first_per_key([remedy for remedy in remedies(plan) if remedy.needed <= available])
    if sufficient:
        return "set " + ", or ".join(_describe(remedy) for remedy in sufficient[:3])
    combined, combined_fits = _combine_changes(plan, available)
    listed = ", and ".join(_describe(remedy) for remedy in combined)
    if combined_fits:
        return f"set {listed}: together {format_bytes(combined[-1].needed)}"
    if combined:
        return (
            f"use a smaller model or a larger device: even with {listed}, the run needs "
            f"{format_bytes(combined[-1].needed)}"
        )
    return "use a smaller model or a larger device"


def _resumed_run_remedy(plan: Plan, device: DeviceFacts, available: int) -> str:
    """A resumed run keeps its batch, dtypes and optimizer; only activation checkpointing can change."""
    allowed = [remedy for remedy in remedies(plan) if remedy.change.split(":")[0] in CHANGEABLE_ON_RESUME]
    sufficient = [remedy for remedy in allowed if remedy.needed <= available]
    if sufficient:
        return "set " + ", or ".join(_describe(remedy) for remedy in sufficient)
    smallest = min(allowed, key=lambda remedy: remedy.needed, default=None)
    needed, first = _needed(plan), ""
    if smallest is not None:
        needed, first = smallest.needed, f"set {smallest.change} and "
    how = "raise memory_limit to" if needed <= device.available_bytes else "continue on a device with"
    return f"{first}{how} {format_bytes(needed, up=True)}: the resumed run cannot use less"


def _describe_need(plan: Plan) -> str:
    """Describes the needed memory, and if `recompute` is automatic, that no other setting needs less."""
    moment = plan.memory.moment.describe()
    if copy := background_bytes(plan.job, plan.disk):
        moment += f"; {format_bytes(copy)} of it for writing checkpoints in the background"
    peak = f"{format_bytes(_needed(plan), up=True)} at its peak ({moment})"
    auto = plan.recipe.recompute == "auto" and plan.recipe.gradient_checkpointing is None
    if not auto or _needed(plan) <= plan.limit:
        return peak
    # The search found no fitting setting and returned the lowest-memory one.
    return f"at least {peak}, with recompute: {plan.resolved.memory_plan.description},"


def _needed(plan: Plan) -> int:
    """Device memory for training; on a CPU checkpoints are written from a copy in the same memory."""
    return plan.memory.needed + background_bytes(plan.job, plan.disk)


def _describe_available(plan: Plan, device: DeviceFacts, available: int) -> str:
    if available < device.available_bytes:
        return f"memory_limit: {plan.recipe.memory_limit} allows {format_bytes(available)}"
    return f"{device.name} has {format_bytes(available)} free"


def _check_host(plan: Plan, device: DeviceFacts) -> None:
    if device.unified and plan.memory.host:
        raise ResourceError(
            f"recompute: offload gains nothing on {device.name}, whose GPU and CPU share one memory",
            "set recompute: auto",
        )
    host_free, pinnable = device.host_free_bytes, device.pinnable_bytes
    if host_free is None or pinnable is None or plan.memory.host <= pinnable:
        return
    raise ResourceError(
        f"recompute: offload needs {format_bytes(plan.memory.host)} of pinned host memory; "
        f"{format_bytes(host_free)} are free, of which {format_bytes(pinnable)} may be pinned",
        "set recompute: auto, or fewer layers to offload, or a shorter max_seq_length",
    )


def _check_phases(plan: Plan, device: DeviceFacts, available: int) -> None:
    """Raise a ResourceError for a phase other than the training step that needs more than is available."""
    phase = plan.phases.peak
    if phase.phase in STEP_PHASES or phase.needed <= available:
        return
    needs = f"{phase.phase.value} needs {format_bytes(phase.needed, up=True)} ({phase.note})"
    raise ResourceError(
        f"{needs} and {_describe_available(plan, device, available)}", PHASE_REMEDIES[phase.phase]
    )


def _check_graphs(plan: Plan, device: DeviceFacts, available: int) -> None:
    """Raise a ResourceError if the recipe requires CUDA graphs and only an eager step fits."""
    lacking = missing_for_graphs(plan)
    if lacking:
        needed = format_bytes(available + lacking, up=True)
        raise ResourceError(
            f"training with cuda_graphs: true needs {needed}, including memory that is reserved during a capture, and "
            f"{_describe_available(plan, device, available)}",
            "set cuda_graphs: auto",
        )


def missing_for_graphs(plan: Plan) -> int:
    """Returns the bytes that are missing for CUDA graphs that the recipe requires; `auto` captures only what fits.

    Example:
        >>> missing_for_graphs(make_plan(recipe, shape, resolved, device=gpu))  # doctest: +SKIP
        0
    """
    required = plan.recipe.cuda_graphs is True and plan.resolved.graphs.enabled
    return graphs_shortfall(plan.job, plan.limit, capped=plan.is_capped) if required else 0


def remedies(plan: Plan) -> list[Remedy]:
    """Returns every single change that saves memory: first those with the same updates, the fastest first."""
    pairs = [(change, remedy) for change, remedy in _options(plan, plan.job) if remedy.saving > 0]
    pairs.sort(key=lambda pair: (not pair[0].same_training, pair[1].seconds or 0.0))
    return [remedy for _, remedy in pairs]


def _first_per_key(candidates: list[Remedy]) -> list[Remedy]:
    """The first remedy of each recipe key."""
    by_key: dict[str, Remedy] = {}
    for remedy in candidates:
        by_key.setdefault(remedy.change.split(":")[0], remedy)
    return list(by_key.values())


def _describe(remedy: Remedy) -> str:
    cost = ""
    if remedy.seconds is not None and remedy.seconds > 0.0005:
        cost = f", costs {format_seconds(remedy.seconds)} per step"
    return f"{remedy.change} (saves {format_bytes(remedy.saving)}{cost})"


def _options(plan: Plan, job: Job) -> list[tuple[Change, Remedy]]:
    suggested = [change for change in savings(plan, job) if change.suggested]
    copy = background_bytes(plan.job, plan.disk)  # upper bound: the copy of a changed run is no larger
    return [
        (
            effect.change,
            Remedy(_change_text(effect.change), effect.needed + copy, effect.saved, effect.seconds),
        )
        for effect in effects(plan, suggested, job)
    ]


def _change_text(change: Change) -> str:
    return f"{change.text}, which trains adapters only" if change.name == "LoRA" else change.text


def _combine_changes(plan: Plan, available: int) -> tuple[list[Remedy], bool]:
    """Combines changes in their order until the run fits; returns them and whether it fits."""
    job = plan.job
    steps: list[Remedy] = []
    while True:
        options = [(change.job, remedy) for change, remedy in _options(plan, job) if remedy.saving > 0]
        if not options:
            return steps, False
        job, step = options[0]
        key = step.change.split(":")[0]
        if steps and steps[-1].change.split(":")[0] == key:
            # The same key again: report only its last value and the total saving.
            before = steps.pop()
            step = Remedy(
                step.change,
                step.needed,
                step.saving + before.saving,
                _sum_seconds(before.seconds, step.seconds),
            )
        steps.append(step)
        if step.needed <= available:
            return steps, True


def _sum_seconds(*seconds: float | None) -> float | None:
    known = [value for value in seconds if value is not None]
    return sum(known) if len(known) == len(seconds) else None
