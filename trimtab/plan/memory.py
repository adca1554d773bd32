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

from trimtab.data import spec as data_spec
from trimtab.facts.dtypes import BYTES, nbytes
from trimtab.facts.shapes import ModelShape
from trimtab.kernels.attention import spec as attention_spec
from trimtab.kernels.linear_cross_entropy import spec as loss_spec
from trimtab.model import spec as model_spec
from trimtab.optim import spec as optim_spec

OUTSIDE = {"cuda": 720_000_000, "cpu": 400_000_000}
"""Bytes of a process besides its tensors. On a GPU the CUDA context and loaded kernels: 0.72 GB measured on
an H200 with torch 2.11 after one product. On a CPU the interpreter with its libraries, 0.23 GB resident after
importing torch 2.13 and one product, and what the C allocator keeps."""


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
class Job:
    """What decides the memory of a step: the recipe's keys after every `auto` has been settled."""

    shape: ModelShape
    batch: int
    """Windows of a microbatch."""
    tokens: int
    """Tokens of a window."""
    accumulation: int
    dtype: str
    weights_dtype: str
    gradient_dtype: str
    optimizer: str
    attention: str
    device: str
    bf16: bool = False
    """Whether the device computes bf16 in hardware."""
    packed: bool = True
    recompute: bool = False
    optimizer_impl: str = "reference"
    loss_impl: str = "chunked"
    loss_memory: int | None = None
    """Bytes that the loss "triton" may hold beyond inputs and gradients."""
    in_backward: bool = False
    """Whether backward itself updates each weight and frees its gradient."""


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
    )


def weight_bytes(job: Job) -> int:
    """Bytes of all parameters."""
    return model_spec.parameter_bytes(job.shape, job.weights_dtype)


def gradient_bytes(job: Job) -> int:
    """Bytes of all gradients that a backward pass leaves."""
    return 0 if job.in_backward else nbytes(job.gradient_dtype, job.shape.num_parameters)


def state_bytes(job: Job) -> int:
    """Bytes of all optimizer states."""
    return sum(
        optim_spec.state_bytes(job.optimizer, dims, job.weights_dtype) for _, dims in job.shape.parameters()
    )


def _moments(job: Job, gradients: int) -> Iterator[tuple[str, int]]:
    """(moment, bytes above weights and optimizer states)."""
    shape, N = job.shape, job.batch * job.tokens
    earlier = gradients if job.accumulation > 1 else 0
    saved = model_spec.saved_bytes(
        shape,
        batch=job.batch,
        tokens=job.tokens,
        dtype=job.dtype,
        attention=job.attention,
        weights_dtype=job.weights_dtype,
        recompute=job.recompute,
        packed=job.packed,
        device=job.device,
    )
    # A loader hands over the whole step's batches on the host; the microbatch at work is on the device.
    kept = saved.kept + data_spec.batch_bytes(job.batch, job.tokens)
    dims = (N, shape.hidden_size, shape.vocab_size)
    autocast = job.dtype != job.weights_dtype
    options: dict[str, Any] = {
        "memory_bytes": job.loss_memory,
        "gradient_dtype": job.dtype if autocast else job.gradient_dtype,
    }
    loss = loss_spec.saved_bytes(job.loss_impl, *dims, job.dtype, **options)
    chunk = loss_spec.scratch_bytes(job.loss_impl, *dims, job.dtype, **options)
    if autocast:  # it copies hidden states and head for the loss
        chunk += (N + shape.vocab_size) * shape.hidden_size * BYTES[job.dtype]
    ready = loss_spec.with_loss(job.loss_impl, *dims, job.dtype, **options)
    head = nbytes(job.gradient_dtype, shape.vocab_size * shape.hidden_size)
    stream = N * shape.hidden_size * BYTES[_stream(job)]

    yield "the loss, at the end of forward", earlier + kept + stream + loss + chunk
    # Gradients that were computed with the loss wait, "triton"'s in the format they stay in; else the logits come
    # once more, from the hidden states that were kept for it.
    made = head + stream
    if ready and job.loss_impl == "triton" and not autocast:
        made = 0
    yield "the loss, in backward", earlier + kept + loss + made + (0 if ready else stream + chunk)
    # From here on the head's gradient is there too. A tied one waits beside the others for the embedding's.
    held = head if shape.tie_embeddings else (0 if earlier or job.in_backward else head)
    update = _update_scratch(job) if job.in_backward else 0
    yield (
        "backward through the last layer",
        earlier + kept + held + saved.working + stream + max(_block_scratch(job), update),
    )
    matrices = 0 if job.in_backward else gradients - head * (1 if shape.tie_embeddings else 2)
    per_layer = matrices // max(shape.num_layers, 1)
    first = kept - saved.blocks + saved.blocks // shape.num_layers
    yield (
        "backward through the first layer",
        (earlier or (matrices - per_layer))
        + held
        + first
        + saved.working
        + stream
        + max(_block_scratch(job), update),
    )
    # The embedding's gradient is dense, made in the weights' format, and added to what is there.
    dense = _made_gradient(job, shape.vocab_size * shape.hidden_size)
    yield (
        "the embedding, at the end of backward",
        (earlier or matrices) + held + max(dense, update) + stream + kept - saved.blocks,
    )
    yield "the optimizer step", 0 if job.in_backward else gradients + _update_scratch(job)


def _stream(job: Job) -> str:
    """Format of the residual stream: under autocast that of the weights."""
    return job.weights_dtype if job.weights_dtype != job.dtype else job.dtype


def _made_gradient(job: Job, count: int) -> int:
    """A weight's gradient as backward makes it: in the weight's format, then cast if kept in another."""
    made = nbytes(job.weights_dtype, count)
    return made if job.weights_dtype == job.gradient_dtype else made + nbytes(job.gradient_dtype, count)


def _block_scratch(job: Job) -> int:
    """Most bytes a block's backward holds beyond what the block kept: the larger of its two halves.

    Feed-forward goes first: the gradient of the product and one weight's, then, the product being freed,
    those of both its factors. Attention follows when all that the feed-forward kept is free again: gradients
    of o, q, k, v, one weight's, and the kernel's own.
    """
    shape, N, width = job.shape, job.batch * job.tokens, BYTES[job.dtype]
    C, I = shape.hidden_size, shape.intermediate_size  # noqa: E741
    H, K, D = shape.num_heads, shape.num_kv_heads, shape.head_dim
    feed_forward = N * I * width + max(N * I * width, _made_gradient(job, C * I))
    kernel = attention_spec.scratch_bytes(
        job.attention, job.batch, job.tokens, job.tokens, H, K, D, job.dtype
    )
    attention = (2 * N * H * D + 2 * N * K * D) * width + kernel + _made_gradient(job, C * H * D)
    freed = (4 * N * I + N * C) * width
    return max(feed_forward, attention - freed)


def _update_scratch(job: Job) -> int:
    return max(
        optim_spec.scratch_bytes(
            job.optimizer, dims, job.weights_dtype, device=job.device, impl=job.optimizer_impl
        )
        for _, dims in job.shape.parameters()
    )
