"""The memory plan of a run: the recipe's memory keys resolved for one machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from trimtab.adapt.spec_recompute import sort_policies
from trimtab.facts.devices import DeviceFacts
from trimtab.facts.errors import RecipeError
from trimtab.facts.shapes import ModelShape
from trimtab.facts.units import format_bytes, format_seconds, parse_bytes, parse_share
from trimtab.plan import dequantized_copies, memory_search
from trimtab.plan.checkpoints import background_bytes, checkpoint_disk
from trimtab.plan.data import total_steps
from trimtab.plan.graphs import (
    find_setting_for_graphs,
    graphs_do_not_fit,
    graphs_shortfall,
    requested_graphs,
)
from trimtab.plan.job import Job
from trimtab.plan.memory import BYTES_OUTSIDE_ALLOCATOR, predict
from trimtab.plan.memory_search import MemorySetting
from trimtab.plan.resolved import CudaGraphsConfig, MemoryPlan
from trimtab.plan.step_time import step_time_at
from trimtab.recipe.keys import Recipe


def limit_of(recipe: Recipe, device: DeviceFacts) -> tuple[int, str]:
    """Returns (bytes that the run may use, a description of that limit); never more than is free.

    Example:
        >>> from trimtab.recipe import loads
        >>> gpu = DeviceFacts("a GPU", "cuda", memory_bytes=40 * 2**30, free_bytes=36 * 2**30)
        >>> limit_of(loads("model: a\\ndata: {train: x}\\nmemory_limit: 24GiB"), gpu)
        (25769803776, 'memory_limit: 24GiB')
        >>> limit_of(loads("model: a\\ndata: {train: x}\\nmemory_limit: 100%"), gpu)[1]
        'the 36.0 GiB of free memory, which is less than memory_limit: 100%'
    """
    available = device.available_bytes
    if recipe.memory_limit is None:
        return available, f"the {format_bytes(available)} of free memory"
    share = parse_share(recipe.memory_limit)
    requested = parse_bytes(recipe.memory_limit) if share is None else int(share * device.memory_bytes)
    assert requested is not None, "recipe validation accepts only sizes and shares"
    setting = f"memory_limit: {recipe.memory_limit}"
    return (
        (requested, setting)
        if requested <= available
        else (available, f"the {format_bytes(available)} of free memory, which is less than {setting}")
    )


def requested_policies(recipe: Recipe, shape: ModelShape) -> tuple[str, ...] | None:
    """Returns the policy of each layer if the recipe sets them; None for `auto`."""
    L, recompute = shape.num_layers, recipe.recompute
    if recipe.gradient_checkpointing is not None:
        return (("block" if recipe.gradient_checkpointing else "none"),) * L
    if recompute == "auto":
        return None
    if isinstance(recompute, str):
        return (recompute,) * L
    if isinstance(recompute, list):
        if len(recompute) != L:
            raise RecipeError(
                f"recompute names {len(recompute)} policies and the model has {L} layers",
                "give one policy per layer, one policy for all layers, or the number of layers per policy",
            )
        return tuple(recompute)
    named = sum(recompute.values())
    if named > L:
        raise RecipeError(
            f"recompute names {named} layers and the model has {L}", f"make the counts add up to at most {L}"
        )
    counts = {str(policy): count for policy, count in recompute.items()}
    return sort_policies({**counts, "none": counts.get("none", 0) + L - named})


def resolve_memory_plan(
    recipe: Recipe, job: Job, device: DeviceFacts, *, tiles: int | None = None, fixed_loss: bool = False
) -> tuple[MemoryPlan, CudaGraphsConfig]:
    """Choose recompute policies, tiles, dequantized copies and CUDA graphs from the recipe and the available memory.

    Args:
        recipe: the recipe with its memory keys.
        job: all other settings that determine the memory of a step.
        device: the device of the run.
        tiles: feed-forward tiles of the first start, when resuming: they determine how sums are rounded.
        fixed_loss: whether to keep the job's loss memory, for the same reason.
    """
    limit, basis = limit_of(recipe, device)
    if tiles is None and recipe.mlp_tiles != "auto":
        tiles = recipe.mlp_tiles
    named = requested_policies(recipe, job.shape)
    job = job.changed(dequantized_layers=dequantized_copies.requested_copies(recipe, job.shape))
    disk = checkpoint_disk(recipe, job, total_steps(recipe, None))
    reserved = background_bytes(job, disk)

    def search(reserved: int, tiles: int | None = tiles) -> tuple[MemorySetting, bool]:
        return _search(job, device, limit, named, tiles, fixed_loss, reserved=reserved)

    setting, fits = search(0)
    if fits and setting.needed > limit - reserved:
        # The number of checkpoints may depend on the data. Until it is known, the number of tiles stays if it can.
        kept = setting.mlp_tiles if disk.saving.saves is None else tiles
        setting, fits = search(reserved, kept)
        if setting.needed > limit - reserved and kept != tiles:
            setting, fits = search(reserved)
    first = _add_copies(recipe, job, setting, fits, limit), fits

    def search_again(reserved: int) -> tuple[MemorySetting, bool]:
        found = search(reserved) if named is None else (setting, setting.needed <= limit - reserved)
        return _add_copies(recipe, job, *found, limit, reserved), found[1]

    (chosen, fits), graphs = _choose_graphs(recipe, job, device, (limit, basis), first, search_again)
    limit_name = basis if chosen is first[0] else f"{basis} with CUDA graphs"
    plan = MemoryPlan(
        recompute=tuple(chosen.policies),
        mlp_tiles=chosen.mlp_tiles,
        loss_memory=chosen.loss_memory,
        dequantized_layers=chosen.dequantized_layers,
        limit=limit,
        limit_basis=basis,
        allocator_bytes=limit - BYTES_OUTSIDE_ALLOCATOR[job.device]
        if recipe.memory_limit is not None
        else None,
        host_bytes=chosen.host,
        reason=_reason(job, device, chosen, named is not None, fits, limit - reserved, limit_name),
    )
    return plan, graphs


def _choose_graphs(
    recipe: Recipe,
    job: Job,
    device: DeviceFacts,
    limit: tuple[int, str],
    first: tuple[MemorySetting, bool],
    search: Callable[[int], tuple[MemorySetting, bool]],
) -> tuple[tuple[MemorySetting, bool], CudaGraphsConfig]:
    """Chooses between the first setting, if need be without CUDA graphs, and one with which they fit.

    Args:
        recipe: the recipe.
        job: the job without its memory plan.
        device: the device, whose rates are compared without its calibration (`memory_search.search_rates`).
        limit: bytes on the device, and a description.
        first: the fastest setting and whether it fits.
        search: the same for a setting that leaves these bytes of the limit free; policies set in the recipe are kept.
    """
    setting, fits = first
    graphs = requested_graphs(recipe, _job_with(job, setting), device)
    capped = recipe.memory_limit is not None
    lacking = graphs_shortfall(_job_with(job, setting), limit[0], capped=capped) if graphs.enabled else 0
    if lacking == 0:
        return first, graphs
    found = None
    if fits:
        found = find_setting_for_graphs(
            setting,
            lacking,
            limit[0],
            lambda needed: search(limit[0] - needed),
            lambda other, nbytes: graphs_shortfall(_job_with(job, other), nbytes, capped=capped),
        )
    if recipe.cuda_graphs is True:
        return found or first, graphs
    without = graphs_do_not_fit(limit[0], lacking, limit[1])
    if found is None or not requested_graphs(recipe, _job_with(job, found[0]), device).enabled:
        return first, without
    rates = memory_search.search_rates(device, job.dtype)
    captured = step_time_at(_job_with(job, found[0]), rates, graphs=True).seconds
    eager = step_time_at(_job_with(job, setting), rates).seconds
    if captured <= eager:
        return found, graphs
    slower = f"{without.reason}; settings with which they fit are slower"
    return first, dataclasses.replace(without, reason=slower)


def _job_with(job: Job, setting: MemorySetting) -> Job:
    """The job with a memory setting."""
    return job.changed(
        policies=setting.policies,
        mlp_tiles=setting.mlp_tiles,
        loss_memory=setting.loss_memory,
        dequantized_layers=setting.dequantized_layers,
    )


def _add_copies(
    recipe: Recipe, job: Job, setting: MemorySetting, fits: bool, limit: int, reserved: int = 0
) -> MemorySetting:
    """The setting with the dequantized copies that the remaining memory allows, if the recipe leaves it open."""
    if not fits or recipe.dequantized_layers != "auto":
        return setting
    return dequantized_copies.add_dequantized_copies(job, setting, limit, reserved=reserved)


def _search(
    job: Job,
    device: DeviceFacts,
    limit: int,
    policies: tuple[str, ...] | None,
    tiles: int | None,
    fixed_loss: bool,
    *,
    reserved: int = 0,
) -> tuple[MemorySetting, bool]:
    """The fastest setting within the limit and True, or the lowest-memory one and False."""
    if policies is None:
        return memory_search.find_setting(
            job, device, limit, reserved=reserved, tiles=tiles, fixed_loss=fixed_loss
        )
    return memory_search.find_setting_with_policies(
        job, device, limit - reserved, policies, tiles=tiles, fixed_loss=fixed_loss
    )


def _reason(
    job: Job,
    device: DeviceFacts,
    setting: MemorySetting,
    named: bool,
    fits: bool,
    within: int,
    limit_name: str,
) -> str:
    if named:
        return "set in the recipe" if fits else f"set in the recipe; does not fit {limit_name}"
    if not fits and setting.needed <= within:
        return f"the lowest-memory setting; it uses almost all of {limit_name}"
    if not fits:
        return f"the lowest-memory setting, and still more than {limit_name}"
    variant = job.changed(policies=(), mlp_tiles=setting.mlp_tiles, loss_memory=setting.loss_memory)
    save_all = predict(variant).needed
    if set(setting.policies) == {"none"}:
        return f"everything fits {limit_name}"
    job = job.changed(mlp_tiles=setting.mlp_tiles)
    seconds = memory_search.recompute_seconds(job, device, setting.policies)
    spare = "" if seconds is None else f" and be an estimated {format_seconds(seconds)} per microbatch faster"
    return f"the fastest that fits {limit_name}; saving all activations would take {format_bytes(save_all)}{spare}"
