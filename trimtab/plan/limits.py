"""The memory plan of a run: the recipe's memory keys resolved for one machine."""

from __future__ import annotations

from trimtab.adapt.spec_recompute import sort_policies
from trimtab.facts.devices import DeviceFacts
from trimtab.facts.errors import RecipeError
from trimtab.facts.shapes import ModelShape
from trimtab.facts.units import format_bytes, format_seconds, parse_bytes, parse_share
from trimtab.plan import dequantized_copies, memory_search
from trimtab.plan.checkpoints import background_bytes, checkpoint_disk
from trimtab.plan.data import total_steps
from trimtab.plan.job import Job
from trimtab.plan.memory import BYTES_OUTSIDE_ALLOCATOR, predict
from trimtab.plan.resolved import MemoryPlan
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
) -> MemoryPlan:
    """Choose recompute policies, tiles and dequantized copies from the recipe and the available memory.

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
    setting, fits = _search(job, device, limit, named, tiles, fixed_loss)
    if fits and setting.needed > limit - reserved:
        # The number of checkpoints may depend on the data. Until it is known, the number of tiles stays if it can.
        kept = setting.mlp_tiles if disk.saving.saves is None else tiles
        setting, fits = _search(job, device, limit, named, kept, fixed_loss, reserved=reserved)
        if setting.needed > limit - reserved and kept != tiles:
            setting, fits = _search(job, device, limit, named, tiles, fixed_loss, reserved=reserved)
    if fits and recipe.dequantized_layers == "auto":
        setting = dequantized_copies.add_dequantized_copies(job, setting, limit)
    return MemoryPlan(
        recompute=tuple(setting.policies),
        mlp_tiles=setting.mlp_tiles,
        loss_memory=setting.loss_memory,
        dequantized_layers=setting.dequantized_layers,
        limit=limit,
        limit_basis=basis,
        allocator_bytes=limit - BYTES_OUTSIDE_ALLOCATOR[job.device]
        if recipe.memory_limit is not None
        else None,
        host_bytes=setting.host,
        reason=_reason(job, device, setting, named is not None, fits, limit - reserved, basis),
    )


def _search(
    job: Job,
    device: DeviceFacts,
    limit: int,
    policies: tuple[str, ...] | None,
    tiles: int | None,
    fixed_loss: bool,
    *,
    reserved: int = 0,
) -> tuple[memory_search.MemorySetting, bool]:
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
    setting: memory_search.MemorySetting,
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
