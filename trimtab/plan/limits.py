"""What a recipe says of memory, settled for one machine: its keys become numbers."""

from __future__ import annotations

from typing import Any

from trimtab.adapt.spec_recompute import canonical, counted
from trimtab.facts.devices import DeviceFacts
from trimtab.facts.errors import RecipeError
from trimtab.facts.shapes import ModelShape
from trimtab.facts.units import format_bytes, format_seconds, parse_bytes, parse_share
from trimtab.plan import dial, unpacked
from trimtab.plan.job import Job
from trimtab.plan.memory import CONTEXT, predict
from trimtab.plan.policies import cost_of, policy_costs
from trimtab.recipe.keys import Recipe


def limit_of(recipe: Recipe, device: DeviceFacts) -> tuple[int, str]:
    """(bytes that the run may take, in words where that is from); never more than is free.

    Example:
        >>> from trimtab.recipe import loads
        >>> gpu = DeviceFacts("a GPU", "cuda", memory_bytes=40 * 2**30, free_bytes=36 * 2**30)
        >>> limit_of(loads("model: a\\ndata: {train: x}\\nmemory_limit: 24GiB"), gpu)
        (25769803776, 'memory_limit: 24GiB')
        >>> limit_of(loads("model: a\\ndata: {train: x}\\nmemory_limit: 100%"), gpu)[1]
        'the 36.0 GiB that are free, which is less than memory_limit: 100%'
    """
    free = device.available_bytes
    if recipe.memory_limit is None:
        return free, f"the {format_bytes(free)} that are free"
    share = parse_share(recipe.memory_limit)
    asked = parse_bytes(recipe.memory_limit) if share is None else int(share * device.memory_bytes)
    assert asked is not None, "the recipe's rules let through only sizes and shares"
    words = f"memory_limit: {recipe.memory_limit}"
    return (
        (asked, words)
        if asked <= free
        else (free, f"the {format_bytes(free)} that are free, which is less than {words}")
    )


def by_hand(recipe: Recipe, shape: ModelShape) -> tuple[str, ...] | None:
    """The policy of each layer as the recipe names them; None where it leaves the choice."""
    L, wish = shape.num_layers, recipe.recompute
    if recipe.gradient_checkpointing is not None:
        return (("block" if recipe.gradient_checkpointing else "none"),) * L
    if wish == "auto":
        return None
    if isinstance(wish, str):
        return (wish,) * L
    if isinstance(wish, list):
        if len(wish) != L:
            raise RecipeError(
                f"recompute names {len(wish)} policies and the model has {L} layers",
                "give one for each layer, one word for all, or how many layers have which",
            )
        return tuple(wish)
    named = sum(wish.values())
    if named > L:
        raise RecipeError(
            f"recompute names {named} layers and the model has {L}", f"let the numbers add up to {L} at most"
        )
    counts = {str(policy): count for policy, count in wish.items()}
    return canonical({**counts, "none": counts.get("none", 0) + L - named})


def settle(
    recipe: Recipe, job: Job, device: DeviceFacts, *, tiles: int | None = None, fixed_loss: bool = False
) -> dict[str, Any]:
    """What was chosen, in plain data, to be kept with the run.

    Args:
        recipe: what is asked.
        job: everything else that decides the memory of a step.
        device: where it runs.
        tiles: of the feed-forward, where an earlier start has chosen them: they decide how sums are rounded.
        fixed_loss: whether the loss holds what the job says, for the same reason.
    """
    limit, words = limit_of(recipe, device)
    if tiles is None and recipe.mlp_tiles != "auto":
        tiles = recipe.mlp_tiles
    named = by_hand(recipe, job.shape)
    job = job.changed(unpacked_layers=unpacked.by_hand(recipe, job.shape))
    if named is None:
        setting, fits = dial.choose(job, device, limit, tiles=tiles, fixed_loss=fixed_loss)
    else:
        setting, fits = dial.with_policies(job, device, limit, named, tiles=tiles, fixed_loss=fixed_loss)
    if fits and recipe.unpacked_layers == "auto":
        setting = unpacked.unpack(job, setting, limit)
    chosen = {
        "recompute": list(setting.policies),
        "mlp_tiles": setting.mlp_tiles,
        "loss_memory": setting.loss_memory,
        "unpacked_layers": setting.unpacked_layers,
        "limit": limit,
        "limit_basis": words,
        "allocator_bytes": limit - CONTEXT[job.device] if recipe.memory_limit is not None else None,
        "host_bytes": setting.host,
        "reason": _reason(job, device, setting, named is not None, fits, limit, words),
    }
    return {**chosen, "sentence": sentence(chosen, job.shape.num_layers)}


def _reason(
    job: Job, device: DeviceFacts, setting: dial.Setting, named: bool, fits: bool, limit: int, words: str
) -> str:
    if named:
        return "named in the recipe" if fits else f"named in the recipe; does not fit {words}"
    if not fits and setting.needed <= limit:
        return f"the least that there is; it leaves almost nothing of {words}"
    if not fits:
        return f"the least that there is, and still more than {words}"
    plain = predict(job.changed(policies=(), mlp_tiles=setting.mlp_tiles)).needed
    if set(setting.policies) == {"none"}:
        return f"everything fits {words}"
    job = job.changed(mlp_tiles=setting.mlp_tiles)
    _, seconds = cost_of(policy_costs(job, device), setting.policies)
    spare = "" if seconds is None else f" and spare {format_seconds(seconds)} a microbatch, by arithmetic"
    return f"the fastest that fits {words}; keeping everything would take {format_bytes(plain)}{spare}"


def sentence(chosen: dict[str, Any], num_layers: int) -> str:
    """The choice for people: "20 layers block, 8 none".

    Example:
        >>> sentence({"recompute": ["block", "none", "none"], "mlp_tiles": 4}, 3)
        '1 layer block, 2 none; feed-forward in 4 tiles'
        >>> sentence({"recompute": ["none"] * 3, "mlp_tiles": 1, "unpacked_layers": 2}, 3)
        'none in all 3 layers; weights of 2 also unpacked'
    """
    counts = counted(tuple(chosen["recompute"]))
    if len(counts) == 1:
        text = f"{next(iter(counts))} in all {num_layers} layers"
    else:
        parts = [f"{count} {policy}" for policy, count in counts.items()]
        first = next(iter(counts.values()))
        text = ", ".join([parts[0].replace(" ", " layer " if first == 1 else " layers ", 1), *parts[1:]])
    if chosen["mlp_tiles"] > 1:
        text += f"; feed-forward in {chosen['mlp_tiles']} tiles"
    also = chosen.get("unpacked_layers", 0)  # not in the folders of runs made before there was a choice
    return text + (f"; weights of {also} also unpacked" if also else "")
