"""A run that goes on with another device than the one it began on."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path

from trimtab.facts.devices import DeviceFacts
from trimtab.facts.errors import ResourceError
from trimtab.facts.shapes import ModelShape
from trimtab.plan.resolved import Resolved
from trimtab.recipe import Recipe, build, to_dict
from trimtab.recipe.resume import WITH_DEVICE
from trimtab.run.device import detect, threads
from trimtab.run.resolve import resolve_backends


def asks_for_device(before: Recipe, recipe: Recipe, overrides: Sequence[str]) -> bool:
    """Whether a resume names a device, also where it is the word that the recipe has already."""
    named = any(override.partition("=")[0].strip() == "device" for override in overrides)
    return named or recipe.device != before.device


def device_of(kept: Resolved, recipe: Recipe, run: Path, *, asked: bool) -> DeviceFacts:
    """The device that a run goes on with: the one that the resume asks for, otherwise the one it has."""
    if asked:
        return detect(recipe.device)
    try:
        return detect(kept.device if recipe.device == "auto" else recipe.device)
    except ResourceError as error:
        import torch

        if torch.cuda.is_available():  # not the one that is named
            raise
        raise ResourceError(
            f"{run} was trained on {kept.device}, and torch sees no CUDA GPU here",
            "`trimtab doctor` says why; to go on without one: "
            f"`trimtab train --resume {shlex.quote(str(run))} device=cpu`",
        ) from error


def moved(kept: Resolved, recipe: Recipe, shape: ModelShape, device: DeviceFacts) -> Resolved:
    """The configuration of a run for another device: formats and adapters stay, implementations are chosen anew."""
    if kept.precision.dtype == "bf16" and device.kind == "cuda" and not device.bf16:
        raise ResourceError(
            f"the run computes in bf16, which {device.name} does not", "go on with device=cpu, or another GPU"
        )
    formats = {
        "dtype": kept.precision.dtype,
        "weights_dtype": kept.precision.weights_dtype,
        "gradient_dtype": kept.precision.gradient_dtype,
    }
    lora = recipe.lora
    if lora is not None and lora.adapter is not None:  # what it brought was resolved when the run began
        lora = type(lora)()
    chosen = resolve_backends(recipe.model_copy(update={**formats, "lora": lora}), shape, device, threads())
    return dataclasses.replace(chosen, lora=kept.lora, deterministic=kept.deterministic)


def with_device(began: Recipe, recipe: Recipe) -> Recipe:
    """The recipe that a run began with, naming the device, and what may change with it, as a resume does."""
    plain = to_dict(began)
    for key in ("device", *WITH_DEVICE):
        section, _, last = key.rpartition(".")
        (plain[section] if section else plain)[last] = getattr(
            getattr(recipe, section) if section else recipe, last
        )
    return build(plain)


def describe_move(old: str, new: Resolved) -> str:
    """What another device means for a run, in a sentence."""
    return (
        f"device: {old} → {new.device}: implementations are chosen anew (attention: {new.attention.only.packed}); from "
        f"here on losses are not bit-equal to those of an unstopped run on {old}"
    )
