"""The memory of a training step over time, moment by moment and part by part. Imports no torch.

The points are those whose largest is the predicted peak: from the same walks, for every layer instead of the ends of
runs of equal layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trimtab.adapt.spec_recompute import saved_under
from trimtab.facts.operations import Activation, Part, bytes_by_part
from trimtab.plan.around import tensors_around
from trimtab.plan.job import Job
from trimtab.plan.layers import (
    LayerMemory,
    Layers,
    backward_instants,
    forward_instants,
    is_offloaded,
    segments_of,
    unpacking_bytes,
)
from trimtab.plan.liveness import Instant, workspace
from trimtab.plan.memory import (
    BEFORE_LAYERS,
    Buckets,
    Memory,
    Moment,
    Phase,
    gradient_bytes,
    phase_tensors,
    state_bytes,
    weight_bytes,
)

Parts = dict[Part, int]


@dataclass(frozen=True)
class Point:
    """Memory at one moment of a step.

    Example:
        >>> Point(Moment(Phase.OPTIMIZER_STEP), Buckets(4, 2, 1, 0, 3), {Part.LOSS: 0}).to_dict()["total"]
        10
    """

    moment: Moment
    buckets: Buckets
    """Gradients are those that exist at the moment."""
    parts: Mapping[Part, int]
    """The activations bucket, by part. Gradients of parameters in it are temporary ones, beyond those that stay."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        parts = {part.value: size for part, size in self.parts.items() if size}
        return {"moment": self.moment.describe(), **self.buckets.to_dict(), "parts": parts}


def step_timeline(job: Job) -> tuple[Point, ...]:
    """Memory at each moment of a step, in order: every layer forward, the loss, every layer backward, the update.

    Example:
        >>> from trimtab.facts.shapes import uniform_shape
        >>> tiny = uniform_shape("llama", 512, 64, 128, 2, num_heads=4, num_kv_heads=2, head_dim=16)
        >>> job = Job(tiny, batch=2, tokens=64, accumulation=1, dtype="fp32", weights_dtype="fp32",
        ...           gradient_dtype="fp32", optimizer="adamw_torch_fused", attention="sdpa_flash", device="cpu")
        >>> for point in step_timeline(job)[:3]:
        ...     print(point.moment.describe(), point.buckets.activations)
        forward through the first layer 704000
        forward through the last layer 1264128
        the loss, at the end of forward 1988608
    """
    standing = (weight_bytes(job), state_bytes(job), gradient_bytes(job))
    return tuple(
        Point(
            moment, _buckets(moment.phase, parts, *standing), _activations(moment.phase, parts, standing[2])
        )
        for moment, parts in _moments(job)
    )


def activation_parts(job: Job, memory: Memory) -> Parts:
    """The activations bucket of a predicted peak, by part; the parts add up to it exactly.

    The peak's gradients bucket is full, as a run measures it. Where the peak comes before all gradients are made, those
    that are missing count as negative gradients of parameters here.
    """
    moments = {
        moment: total for moment, total in memory.moments.items() if moment.phase is not Phase.OPTIMIZER_STEP
    }
    moment = max(moments, key=lambda one: moments[one])
    parts = next(parts for one, parts in _moments(job) if one == moment)
    rest = sum(size for part, size in parts.items() if part is not Part.PARAMETER_GRADIENTS)
    return {**parts, Part.PARAMETER_GRADIENTS: memory.peak.activations - rest}


def _buckets(phase: Phase, parts: Parts, weights: int, states: int, gradients: int) -> Buckets:
    held = min(parts[Part.PARAMETER_GRADIENTS], gradients)
    above, other = sum(parts.values()) - held, 0
    if phase is Phase.OPTIMIZER_STEP:
        above, other = 0, above
    return Buckets(weights, held, states, above, other)


def _activations(phase: Phase, parts: Parts, gradients: int) -> Parts:
    if phase is Phase.OPTIMIZER_STEP:
        return dict.fromkeys(Part, 0)
    return {**parts, Part.PARAMETER_GRADIENTS: max(parts[Part.PARAMETER_GRADIENTS] - gradients, 0)}


@dataclass(frozen=True)
class _LayerParts:
    """`LayerMemory` by part."""

    kept: Parts
    forward: Parts
    backward: Parts
    offloaded: Parts
    gradients: int


def _layer_parts(job: Job, layers: Layers, run: int, policy: str) -> _LayerParts:
    block, memory = layers.blocks[run][0], layers.of(run, policy)
    saved = saved_under(block, policy)
    away = is_offloaded(job, policy)
    # What the layer below offloaded is on its way to the host, or back.
    passing = [Activation(f"below.{one.name}", one.nbytes, one.part) for one in saved] if away else []
    forward = bytes_by_part([*_largest(forward_instants(block, policy)), *passing])
    reading = workspace("dequantize", unpacking_bytes(job)) if memory.peak else []
    backward = bytes_by_part([*_largest(backward_instants(job, block, policy)), *passing, *reading])
    kept = bytes_by_part([] if away else saved)
    found = _LayerParts(kept, forward, backward, bytes_by_part(saved if away else []), memory.gradients)
    assert _agree(found, memory), "the parts of a layer are not its memory"
    return found


def _agree(parts: _LayerParts, memory: LayerMemory) -> bool:
    ours = (parts.kept, parts.forward, parts.backward, parts.offloaded)
    return [sum(one.values()) for one in ours] == [memory.kept, memory.forward, memory.peak, memory.host]


def _largest(instants: Iterable[Instant]) -> list[Activation]:
    """The tensors of the instant that holds most; a walk's state must be read before it goes on."""
    most, found = -1, list[Activation]()
    for one in instants:
        if one.total > most:
            most, found = one.total, one.tensors()
    return found


def _moments(job: Job) -> Iterator[tuple[Moment, Parts]]:
    """Bytes above weights and optimizer states by part, in the order of a step."""
    layers, num_layers = Layers(job), job.shape.num_layers
    around = tensors_around(job, gradient_bytes(job), layers)
    base = {phase: bytes_by_part(phase_tensors(around, phase)) for phase in Phase}
    known: dict[tuple[int, str], _LayerParts] = {}
    pieces = []
    for policy, run, numbers in layers.pieces(segments_of(job.layers)):
        if (run, policy) not in known:
            known[run, policy] = _layer_parts(job, layers, run, policy)
        pieces.append((known[run, policy], numbers))
    kept = dict.fromkeys(Part, 0)
    # Below the first layer that offloads, nothing is on its way to the host or back.
    first = next((numbers[0] for one, numbers in pieces if any(one.offloaded.values())), None)
    for one, numbers in pieces:
        for layer in numbers:
            moment = Moment(Phase.LAYERS_FORWARD, layer, num_layers)
            own = _sum(one.forward, one.offloaded, sign=-1) if layer == first else one.forward
            yield moment, _sum(base[Phase.LAYERS_FORWARD], kept, own)
            kept = _sum(kept, one.kept)
    # What was offloaded last is still on the device, and used from there.
    resident = next((one.offloaded for one, _ in reversed(pieces) if any(one.offloaded.values())), None)
    for phase in BEFORE_LAYERS:
        yield Moment(phase), _sum(base[phase], kept, resident or {})
    gradients = 0
    for one, numbers in reversed(pieces):
        # Of what comes from the host, that in use and that on its way are counted with the layer's backward pass.
        waiting = {} if any(one.offloaded.values()) else resident or {}
        for layer in reversed(numbers):
            kept = _sum(kept, one.kept, sign=-1)
            piled = {Part.PARAMETER_GRADIENTS: gradients}
            moment = Moment(Phase.LAYERS_BACKWARD, layer, num_layers)
            own = _sum(one.backward, one.offloaded, sign=-1) if layer == first else one.backward
            yield moment, _sum(base[Phase.LAYERS_BACKWARD], kept, own, piled, waiting)
            gradients += one.gradients
    for phase in (Phase.EMBEDDING_BACKWARD, Phase.OPTIMIZER_STEP):
        yield Moment(phase), base[phase]


def _sum(first: Parts, *others: Mapping[Part, int], sign: int = 1) -> Parts:
    total = dict(first)
    for other in others:
        for part, size in other.items():
            total[part] += sign * size
    return total
