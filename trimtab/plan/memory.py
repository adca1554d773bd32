"""What a training step holds in memory, moment by moment, added up from what each room declares it costs.

Four buckets and the rest, counted the way a run measures them: weights and optimizer states stand all the
time; gradients are what the backward pass leaves; activations are what forward and backward hold at their
peak besides the gradients; `other` is what the update needs beyond that peak.
"""

# N tokens of a microbatch, C hidden size, I intermediate size, H heads, K key/value heads, D head size

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trimtab.adapt import spec_quantized
from trimtab.adapt.targets import EMBEDDING
from trimtab.data import spec as data_spec
from trimtab.facts.dtypes import BYTES, nbytes
from trimtab.kernels.linear_cross_entropy import spec as loss_spec
from trimtab.model import spec as model_spec
from trimtab.plan.job import Job
from trimtab.plan.layers import (
    Layers,
    layer_bytes,
    layers_of,
    made_gradient,
    segments_of,
    update_scratch,
    workspace_bytes,
)

CONTEXT = {"cuda": 890_000_000, "cpu": 600_000_000}
"""Bytes of a process besides what its allocator holds. On a GPU the CUDA context and loaded kernels: 0.88 GB measured
on an H200 with torch 2.11 during training. On a CPU the interpreter with its libraries and what the C allocator
keeps: 0.53 to 0.56 GB measured during training with torch 2.13."""

LIBRARIES = {"cuda": 2 * 2**25, "cpu": 0}
"""Bytes that the allocator holds for cuBLAS: a workspace each for the forward and the backward pass's thread."""

OUTSIDE = {device: CONTEXT[device] + LIBRARIES[device] for device in CONTEXT}
"""Bytes of a process besides its tensors."""


@dataclass(frozen=True)
class Buckets:
    """Bytes at one moment.

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


@dataclass(frozen=True)
class Memory:
    """The prediction: before the first step, and at the peak of a step with the moment it falls on."""

    before: Buckets
    peak: Buckets
    moment: str
    moments: dict[str, int]
    """Bytes above weights and optimizer states at each moment that was considered."""
    outside: int
    """Bytes of the process besides tensors; needed from the device too, and in no bucket."""
    host: int = 0
    """Pinned bytes of the host, where layers' inputs are kept there."""

    @property
    def needed(self) -> int:
        """What the device must have."""
        return self.peak.total + self.outside


def predict(job: Job) -> Memory:
    """Memory of a training step. Exact about tensors, as far as the rooms' declarations are."""
    weights, states, gradients = weight_bytes(job), state_bytes(job), gradient_bytes(job)
    moments = dict(_moments(job, gradients))
    update = moments.pop("the optimizer step")
    moment = max(moments, key=lambda name: moments[name])
    # The gradients' bucket is full at the end of a step; what the peak holds above it counts as activations.
    activations = max(moments[moment] - gradients, 0)
    other = max(update - gradients - activations, 0)
    if other:
        moment = "the optimizer step"
    return Memory(
        before=Buckets(weights, 0, states, 0, 0),
        peak=Buckets(weights, gradients, states, activations, other),
        moment=moment,
        moments={**moments, "the optimizer step": update},
        outside=OUTSIDE[job.device],
        host=sum(layer_bytes(job, policy).host for policy in job.layers),
    )


def weight_bytes(job: Job) -> int:
    """Bytes of all weights, trained and frozen, those that are kept unpacked beside the packed ones included."""
    return job.trained.weight_bytes + spec_quantized.unpacked_bytes(job.shape, job.unpacked_layers, job.dtype)


def gradient_bytes(job: Job) -> int:
    """Bytes of all gradients that a backward pass leaves."""
    return 0 if job.in_backward else job.trained.gradient_bytes


def state_bytes(job: Job) -> int:
    """Bytes of all optimizer states."""
    return job.trained.state_bytes(job.optimizer)


def _moments(job: Job, gradients: int) -> Iterator[tuple[str, int]]:
    """(moment, bytes above weights and optimizer states)."""
    layers, segments = layers_of(job, gradients), segments_of(job.layers)
    around = dict(moments_around(job, gradients, layers))
    kept = layers.kept(segments)
    for name in ("the loss, at the end of forward", "the loss, in backward"):
        yield name, around[name] + kept
    within = around["backward through the layers"]
    last = job.shape.num_layers - 1
    names = {0: "the first layer", last: "the last layer"}
    for layer, held in layers.backward(segments):
        yield f"backward through {names.get(layer, f'layer {layer}')}", within + held
    for name in ("the embedding, at the end of backward", "the optimizer step"):
        yield name, around[name]


def moments_around(job: Job, gradients: int, layers: Layers) -> Iterator[tuple[str, int]]:
    """(moment, bytes above weights and optimizer states, less those of the blocks)."""
    standing = workspace_bytes(job)
    return ((name, held + standing) for name, held in _moments_around(job, gradients, layers))


def _moments_around(job: Job, gradients: int, layers: Layers) -> Iterator[tuple[str, int]]:
    shape, N = job.shape, job.batch * job.tokens
    earlier = gradients if job.accumulation > 1 else 0
    saved = model_spec.saved_bytes(
        shape,
        batch=job.batch,
        tokens=job.tokens,
        dtype=job.dtype,
        attention=job.attention,
        weights_dtype=job.weights_dtype,
        packed=job.packed,
        device=job.device,
        pointwise=job.pointwise,
        learning=job.trained.learning,
    )
    # A loader hands over the whole step's batches on the host; the microbatch at work is on the device.
    kept = saved.outside + data_spec.batch_bytes(job.batch, job.tokens)
    dims = (N, shape.hidden_size, shape.vocab_size)
    autocast = job.dtype != job.weights_dtype
    adapted = _adapted_head(job)
    head_gradient = job.weights_dtype if adapted else job.gradient_dtype
    options: dict[str, Any] = {
        "memory_bytes": job.loss_memory,
        "gradient_dtype": job.dtype if autocast else head_gradient,
        "weight_grad": job.trained.head > 0 or adapted > 0,
    }
    loss = loss_spec.saved_bytes(job.loss_impl, *dims, job.dtype, **options)
    chunk = loss_spec.scratch_bytes(job.loss_impl, *dims, job.dtype, **options)
    if autocast:  # it copies hidden states and head for the loss
        chunk += (N + shape.vocab_size) * shape.hidden_size * BYTES[job.dtype]
    ready = loss_spec.with_loss(job.loss_impl, *dims, job.dtype, **options)
    head, embedding = job.trained.head, job.trained.named(EMBEDDING)
    stream = layers.stream

    whole = earlier + kept + saved.final + loss + adapted
    yield "the loss, at the end of forward", whole + stream + chunk
    # Gradients that were computed with the loss wait, "triton"'s in the format they stay in; else the logits come
    # once more, from the hidden states that were kept for it.
    made = max(head, adapted) + stream
    if ready and job.loss_impl == "triton" and not autocast:
        made = 0
    yield "the loss, in backward", whole + made + (0 if ready else stream + chunk)
    # From here on the head's gradient is there too. A tied one waits beside the others for the embedding's.
    held = head if shape.tie_embeddings else (0 if earlier or job.in_backward else head)
    yield "backward through the layers", earlier + kept + held + stream
    # The embedding's gradient is dense, made in the weights' format, and added to what is there.
    dense = made_gradient(job, shape.vocab_size * shape.hidden_size) if embedding else 0
    update = update_scratch(job) if job.in_backward else 0
    matrices = layers.gradients * shape.num_layers
    yield (
        "the embedding, at the end of backward",
        (earlier or matrices) + held + max(dense, update) + stream + kept,
    )
    yield "the optimizer step", 0 if job.in_backward else gradients + update_scratch(job)


def _adapted_head(job: Job) -> int:
    """Bytes of the head with its adapter in it, made anew for each loss; one for each scaling of it (DoRA) as well."""
    if not job.trained.adapts_head:
        return 0
    copies = 2 if job.lora is not None and job.lora.use_dora else 1
    return copies * nbytes(job.weights_dtype, job.shape.vocab_size * job.shape.hidden_size)
