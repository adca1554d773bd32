"""The role of a memory block, from the place of the operation that allocated it. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.facts.operations import MemoryPart
from trimtab.facts.phases import RunPhase
from trimtab.facts.tensor_kinds import TensorKind
from trimtab.lab.memory_blocks import Role

SUM_AND_NORM = "trimtab::add_rms_norm"
"""Returns the norm and, as its second result, the normalized residual stream."""
EMBEDDING, HEAD = "embed_tokens", "lm_head"


@dataclass(frozen=True)
class Place:
    """Where in a step an operation ran."""

    phase: RunPhase
    module: str | None = None
    """The running module; None outside of all modules."""
    casts_weight: bool = False
    """Whether its first input is a parameter."""


def role_of(place: Place, operation: str, index: int | None) -> Role:
    """The bucket of a new block and, for activations, its part.

    Args:
        place: the place of the operation.
        operation: its name in torch.
        index: the index of the operation's result in the block; None if the block contains no result.

    Example:
        >>> role_of(Place(RunPhase.FORWARD, "model.layers.3.mlp.up_proj"), "aten::mm", 0).part
        <MemoryPart.FEED_FORWARD: 'feed-forward'>
        >>> role_of(Place(RunPhase.OPTIMIZER_STEP), "aten::mul", 0).kind
        <TensorKind.OTHER: 'other'>
    """
    if place.phase not in (RunPhase.FORWARD, RunPhase.LOSS, RunPhase.BACKWARD):
        return Role(TensorKind.OTHER)
    return Role(TensorKind.ACTIVATIONS, _part(place, operation, index))


def _part(place: Place, operation: str, index: int | None) -> MemoryPart:
    if index is None or (place.casts_weight and operation == "aten::_to_copy"):
        return MemoryPart.WORKSPACE
    if operation == SUM_AND_NORM and index == 1:
        return MemoryPart.RESIDUAL
    if operation == SUM_AND_NORM:
        return MemoryPart.NORMS
    if place.module is None:
        return MemoryPart.LOSS if place.phase is RunPhase.LOSS else MemoryPart.INPUTS
    return part_of_module(place.module)


def part_of_module(module: str) -> MemoryPart:
    """The part of the activations that a module of a decoder makes.

    Example:
        >>> part_of_module("model.layers.0"), part_of_module("model.layers.0.self_attn.q_norm")
        (<MemoryPart.RESIDUAL: 'residual stream'>, <MemoryPart.ATTENTION: 'attention'>)
    """
    names = module.split(".")
    if "self_attn" in names:
        return MemoryPart.ATTENTION
    if "mlp" in names:
        return MemoryPart.FEED_FORWARD
    if any(name.endswith("norm") for name in names):
        return MemoryPart.NORMS
    return MemoryPart.LOSS if HEAD in names else MemoryPart.RESIDUAL
