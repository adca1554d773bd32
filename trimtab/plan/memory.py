"""Peak memory of a training step, phase by phase, summed over the operations that its blocks declare.

Five buckets, counted as a run measures them: weights and optimizer states are persistent; gradients are those at the
end of the backward pass; activations are all other tensors at the peak of forward and backward; `other` is what the
optimizer step needs beyond that peak.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from trimtab.adapt import spec_quantized
from trimtab.facts.operations import Activation
from trimtab.plan.job import Job
from trimtab.plan.layers import AllLayersMemory, Layers, segments_of
from trimtab.plan.outside_blocks import TensorsOutsideBlocks, tensors_outside_blocks

BYTES_OUTSIDE_ALLOCATOR = {"cuda": 890_000_000, "cpu": 600_000_000}
"""Bytes of a process outside its allocator. On a GPU the CUDA context and loaded kernels: 0.88 GB measured on an H200
with torch 2.11 during training. On a CPU the interpreter with its libraries and the C allocator's cache: 0.53 to
0.56 GB measured during training with torch 2.13."""

CUBLAS_BYTES = {"cuda": 2 * 2**25, "cpu": 0}
"""Bytes of cuBLAS workspaces in the allocator: one each for the thread of the forward and the backward pass."""

PROCESS_BYTES = {
    device: BYTES_OUTSIDE_ALLOCATOR[device] + CUBLAS_BYTES[device] for device in BYTES_OUTSIDE_ALLOCATOR
}
"""Bytes of a process in addition to its tensors."""


@dataclass(frozen=True)
class Buckets:
    """Bytes by bucket at one moment.

    Example:
        >>> Buckets(weights=1, gradients=2, optimizer=3, activations=4, other=5).total
        15
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    other: int

    @property
    def total(self) -> int:
        """All buckets together."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.other

    def to_dict(self) -> dict[str, int]:
        """Plain data, `total` included."""
        names = ("weights", "gradients", "optimizer", "activations", "other", "total")
        return {name: getattr(self, name) for name in names}


class Phase(enum.Enum):
    """Phases of a step in which memory may be at its peak."""

    LAYERS_FORWARD = "forward through the layers"
    LOSS_FORWARD = "the loss, at the end of forward"
    LOSS_BACKWARD = "the loss, in backward"
    FINAL_NORM_BACKWARD = "the final norm, in backward"
    LAYERS_BACKWARD = "backward through the layers"
    EMBEDDING_BACKWARD = "the embedding, at the end of backward"
    OPTIMIZER_STEP = "the optimizer step"


BETWEEN_LAYER_PASSES = (Phase.LOSS_FORWARD, Phase.LOSS_BACKWARD, Phase.FINAL_NORM_BACKWARD)
"""Phases after the layers' forward and before their backward pass, in which the saved activations of all layers are
live."""


@dataclass(frozen=True)
class Moment:
    """A phase of a step; in the layers' forward and backward passes also the layer.

    Example:
        >>> Moment(Phase.LAYERS_BACKWARD, layer=3, num_layers=4).describe()
        'backward through the last layer'
    """

    phase: Phase
    layer: int | None = None
    num_layers: int = 0

    def describe(self) -> str:
        """Returns a description for plans and reports."""
        if self.layer is None:
            return self.phase.value
        names = {0: "the first layer", self.num_layers - 1: "the last layer"}
        direction = "forward" if self.phase is Phase.LAYERS_FORWARD else "backward"
        return f"{direction} through {names.get(self.layer, f'layer {self.layer}')}"


@dataclass(frozen=True)
class Memory:
    """Predicted memory before the first step and at the peak of a step, and the moment of the peak."""

    before: Buckets
    peak: Buckets
    moment: Moment
    moments: dict[Moment, int]
    """Bytes above weights and optimizer states at each moment that was considered."""
    process_bytes: int
    """Bytes of the process in addition to tensors; also needed on the device, and in no bucket."""
    host: int = 0
    """Pinned host memory for offloaded activations, in bytes."""

    @property
    def forward_backward(self) -> int:
        """Peak bytes above weights and optimizer states in forward and backward."""
        return max(size for moment, size in self.moments.items() if moment.phase is not Phase.OPTIMIZER_STEP)

    @property
    def needed(self) -> int:
        """Bytes that the device must have."""
        return self.peak.total + self.process_bytes


def predict(job: Job) -> Memory:
    """Predict the memory of a training step. Tensor sizes are as exact as the operations' declarations."""
    weights, states, gradients = weight_bytes(job), state_bytes(job), gradient_bytes(job)
    layers, segments = Layers(job), segments_of(job.layer_policies)
    all_layers = layers.memory(segments)
    moments = dict(_moments(job, gradients, layers, all_layers))
    update = moments.pop(Moment(Phase.OPTIMIZER_STEP))
    moment = max(moments, key=lambda key: moments[key])
    # The gradients bucket is full at the end of a step; everything above it at the peak counts as activations.
    activations = max(moments[moment] - gradients, 0)
    other = max(update - gradients - activations, 0)
    if other:
        moment = Moment(Phase.OPTIMIZER_STEP)
    return Memory(
        before=Buckets(weights, 0, states, 0, 0),
        peak=Buckets(weights, gradients, states, activations, other),
        moment=moment,
        moments={**moments, Moment(Phase.OPTIMIZER_STEP): update},
        process_bytes=PROCESS_BYTES[job.device],
        host=all_layers.host,
    )


def weight_bytes(job: Job) -> int:
    """Returns the bytes of all weights, trained and frozen, including dequantized copies of packed weights."""
    return job.trained.weight_bytes + spec_quantized.dequantized_bytes(
        job.shape, job.dequantized_layers, job.dtype
    )


def gradient_bytes(job: Job) -> int:
    """Returns the bytes of all parameter gradients after a backward pass."""
    return 0 if job.in_backward else job.trained.gradient_bytes


def state_bytes(job: Job) -> int:
    """Returns the bytes of all optimizer states."""
    return job.trained.state_bytes(job.optimizer)


def _moments(
    job: Job, gradients: int, layers: Layers, all_layers: AllLayersMemory
) -> Iterator[tuple[Moment, int]]:
    """Yields (moment, bytes above weights and optimizer states)."""
    outside_blocks = bytes_outside_blocks(job, gradients, layers)
    num_layers = job.shape.num_layers
    for layer, total in all_layers.forward:
        yield Moment(Phase.LAYERS_FORWARD, layer, num_layers), outside_blocks[Phase.LAYERS_FORWARD] + total
    for phase in BETWEEN_LAYER_PASSES:
        yield Moment(phase), outside_blocks[phase] + all_layers.on_device
    for layer, total in all_layers.backward:
        yield Moment(Phase.LAYERS_BACKWARD, layer, num_layers), outside_blocks[Phase.LAYERS_BACKWARD] + total
    for phase in (Phase.EMBEDDING_BACKWARD, Phase.OPTIMIZER_STEP):
        yield Moment(phase), outside_blocks[phase]


def bytes_outside_blocks(job: Job, gradients: int, layers: Layers) -> dict[Phase, int]:
    """Returns the bytes in each phase outside the blocks, above weights and optimizer states."""
    outside = tensors_outside_blocks(job, gradients, layers)
    return {phase: sum(tensor.nbytes for tensor in phase_tensors(outside, phase)) for phase in Phase}


def phase_tensors(outside: TensorsOutsideBlocks, phase: Phase) -> list[Activation]:
    """Returns the live tensors of one phase outside the blocks."""
    tensors: list[Activation] = getattr(outside, phase.name.lower())
    return tensors
