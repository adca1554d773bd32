"""The memory timeline of a training step, by moment and by part. Imports no torch.

The points come from the same walks as the predicted peak and have it as their maximum. The prediction walks only the
ends of each group of equal layers, the timeline every layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trimtab.adapt.spec_recompute import saved_under
from trimtab.facts.operations import Activation, MemoryPart, bytes_by_part
from trimtab.plan.job import Job
from trimtab.plan.layers import (
    LayerMemory,
    Layers,
    backward_instants,
    dequantize_scratch_bytes,
    forward_instants,
    is_offloaded,
    segments_of,
)
from trimtab.plan.liveness import Instant, workspace
from trimtab.plan.memory import (
    BETWEEN_LAYER_PASSES,
    Buckets,
    Memory,
    Moment,
    Phase,
    gradient_bytes,
    phase_tensors,
    state_bytes,
    weight_bytes,
)
from trimtab.plan.outside_blocks import tensors_outside_blocks

Parts = dict[MemoryPart, int]


@dataclass(frozen=True)
class Point:
    """Memory at one moment of a step.

    Example:
        >>> Point(Moment(Phase.OPTIMIZER_STEP), Buckets(4, 2, 1, 0, 3), {MemoryPart.LOSS: 0}).to_dict()["total"]
        10
    """

    moment: Moment
    buckets: Buckets
    """Its gradients are those allocated at this moment."""
    parts: Mapping[MemoryPart, int]
    """The activations bucket by part. Its parameter gradients are temporary, in addition to the gradients bucket."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        parts = {part.value: size for part, size in self.parts.items() if size}
        return {"moment": self.moment.describe(), **self.buckets.to_dict(), "parts": parts}


def step_timeline(job: Job) -> tuple[Point, ...]:
    """Returns the memory at each moment of a step: each layer's forward, the loss, each layer's backward, the update.

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
    """Returns the activations bucket of a predicted peak by part; the parts add up to it exactly.

    The peak's gradients bucket is full, as a run measures it. If the peak occurs before all gradients are computed, the
    missing gradients count as negative parameter gradients here.
    """
    moments = {
        moment: total for moment, total in memory.moments.items() if moment.phase is not Phase.OPTIMIZER_STEP
    }
    moment = max(moments, key=lambda candidate: moments[candidate])
    parts = next(parts for candidate, parts in _moments(job) if candidate == moment)
    rest = sum(size for part, size in parts.items() if part is not MemoryPart.PARAMETER_GRADIENTS)
    return {**parts, MemoryPart.PARAMETER_GRADIENTS: memory.peak.activations - rest}


def _buckets(phase: Phase, parts: Parts, weights: int, states: int, gradients: int) -> Buckets:
    allocated = min(parts[MemoryPart.PARAMETER_GRADIENTS], gradients)
    activations, other = sum(parts.values()) - allocated, 0
    if phase is Phase.OPTIMIZER_STEP:
        activations, other = 0, activations
    return Buckets(weights, allocated, states, activations, other)


def _activations(phase: Phase, parts: Parts, gradients: int) -> Parts:
    if phase is Phase.OPTIMIZER_STEP:
        return dict.fromkeys(MemoryPart, 0)
    return {
        **parts,
        MemoryPart.PARAMETER_GRADIENTS: max(parts[MemoryPart.PARAMETER_GRADIENTS] - gradients, 0),
    }


@dataclass(frozen=True)
class _LayerParts:
    """`LayerMemory` by part."""

    on_device: Parts
    forward: Parts
    backward: Parts
    offloaded: Parts
    gradients: int


def _layer_parts(job: Job, layers: Layers, group: int, policy: str) -> _LayerParts:
    block, memory = layers.blocks[group][0], layers.of(group, policy)
    saved = saved_under(block, policy)
    offloaded = is_offloaded(job, policy)
    # The offloaded activations of the layer below are being copied to or from the host.
    in_flight = (
        [Activation(f"below.{tensor.name}", tensor.nbytes, tensor.part) for tensor in saved]
        if offloaded
        else []
    )
    forward = bytes_by_part([*_largest(forward_instants(block, policy)), *in_flight])
    dequantizing = workspace("dequantize", dequantize_scratch_bytes(job)) if memory.backward else []
    backward = bytes_by_part([*_largest(backward_instants(job, block, policy)), *in_flight, *dequantizing])
    on_device = bytes_by_part([] if offloaded else saved)
    result = _LayerParts(
        on_device, forward, backward, bytes_by_part(saved if offloaded else []), memory.gradients
    )
    assert _agree(result, memory), "the parts of a layer do not add up to its memory"
    return result


def _agree(parts: _LayerParts, memory: LayerMemory) -> bool:
    by_phase = (parts.on_device, parts.forward, parts.backward, parts.offloaded)
    return [sum(sizes.values()) for sizes in by_phase] == [
        memory.on_device,
        memory.forward,
        memory.backward,
        memory.host,
    ]


def _largest(instants: Iterable[Instant]) -> list[Activation]:
    """The tensors of the peak instant; a walk's state must be read before advancing it."""
    largest, tensors = -1, list[Activation]()
    for instant in instants:
        if instant.total > largest:
            largest, tensors = instant.total, instant.tensors()
    return tensors


def _moments(job: Job) -> Iterator[tuple[Moment, Parts]]:
    """Yields (moment, bytes above weights and optimizer states by part), in the order of a step."""
    layers, num_layers = Layers(job), job.shape.num_layers
    outside = tensors_outside_blocks(job, gradient_bytes(job), layers)
    base = {phase: bytes_by_part(phase_tensors(outside, phase)) for phase in Phase}
    cache: dict[tuple[int, str], _LayerParts] = {}
    spans = []
    for policy, group, indices in layers.spans(segments_of(job.layer_policies)):
        if (group, policy) not in cache:
            cache[group, policy] = _layer_parts(job, layers, group, policy)
        spans.append((cache[group, policy], indices))
    saved = dict.fromkeys(MemoryPart, 0)
    # Below the first offloading layer, no copy to or from the host is in flight.
    first = next((indices[0] for layer_parts, indices in spans if any(layer_parts.offloaded.values())), None)
    for layer_parts, indices in spans:
        for layer in indices:
            moment = Moment(Phase.LAYERS_FORWARD, layer, num_layers)
            memory = (
                _sum(layer_parts.forward, layer_parts.offloaded, sign=-1)
                if layer == first
                else layer_parts.forward
            )
            yield moment, _sum(base[Phase.LAYERS_FORWARD], saved, memory)
            saved = _sum(saved, layer_parts.on_device)
    # The last offloaded activations are still on the device and are used from there.
    resident = next(
        (layer_parts.offloaded for layer_parts, _ in reversed(spans) if any(layer_parts.offloaded.values())),
        None,
    )
    for phase in BETWEEN_LAYER_PASSES:
        yield Moment(phase), _sum(base[phase], saved, resident or {})
    gradients = 0
    for layer_parts, indices in reversed(spans):
        # A layer's backward pass already includes its reloaded activations and those being prefetched.
        resident_parts = {} if any(layer_parts.offloaded.values()) else resident or {}
        for layer in reversed(indices):
            saved = _sum(saved, layer_parts.on_device, sign=-1)
            retained = {MemoryPart.PARAMETER_GRADIENTS: gradients}
            moment = Moment(Phase.LAYERS_BACKWARD, layer, num_layers)
            memory = (
                _sum(layer_parts.backward, layer_parts.offloaded, sign=-1)
                if layer == first
                else layer_parts.backward
            )
            yield moment, _sum(base[Phase.LAYERS_BACKWARD], saved, memory, retained, resident_parts)
            gradients += layer_parts.gradients
    for phase in (Phase.EMBEDDING_BACKWARD, Phase.OPTIMIZER_STEP):
        yield Moment(phase), base[phase]


def _sum(first: Parts, *addends: Mapping[MemoryPart, int], sign: int = 1) -> Parts:
    total = dict(first)
    for addend in addends:
        for part, size in addend.items():
            total[part] += sign * size
    return total
