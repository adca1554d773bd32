"""What a training step holds in memory, moment by moment, added up from what each room declares it costs.

Four buckets and the rest, counted the way a run measures them: weights and optimizer states stand all the
time; gradients are what the backward pass leaves; activations are what forward and backward hold at their
peak besides the gradients; `other` is what the update needs beyond that peak.
"""

# N tokens of a microbatch, C hidden size, I intermediate size, H heads, K key/value heads, D head size

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from trimtab.adapt import spec as adapt_spec
from trimtab.adapt import spec_quantized, spec_recompute
from trimtab.adapt.spec import LoraSettings
from trimtab.adapt.targets import EMBEDDING
from trimtab.data import spec as data_spec
from trimtab.facts.dtypes import BYTES, nbytes
from trimtab.facts.shapes import ModelShape
from trimtab.kernels.attention import spec as attention_spec
from trimtab.kernels.linear_cross_entropy import spec as loss_spec
from trimtab.model import spec as model_spec
from trimtab.plan.trained import Trained, trained

CONTEXT = {"cuda": 890_000_000, "cpu": 400_000_000}
"""Bytes of a process besides what its allocator holds. On a GPU the CUDA context and loaded kernels: 0.88 GB measured
on an H200 with torch 2.11 during training. On a CPU the interpreter with its libraries, 0.23 GB resident after
importing torch 2.13 and one product, and what the C allocator keeps."""

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
    policies: tuple[str, ...] = ()
    """What each layer keeps, the first layer's first (`trimtab.adapt.recompute`); empty where all keep everything."""
    mlp_tiles: int = 1
    """Parts of the tokens that feed-forward halves are computed in."""
    pointwise: str = "reference"
    optimizer_impl: str = "reference"
    loss_impl: str = "chunked"
    loss_memory: int | None = None
    """Bytes that the loss "triton" may hold beyond inputs and gradients."""
    in_backward: bool = False
    """Whether backward itself updates each weight and frees its gradient."""
    compiled: bool = False
    """Whether layers are compiled whole, so that nothing inside one can be sent to the host."""
    lora: LoraSettings | None = None
    """The adapters' settings, where adapters are trained and all else is frozen."""
    quantization: dict[str, Any] | None = None
    """How frozen weights are packed: kind, block, double, impl."""
    unpacked_layers: int = 0
    """Layers whose packed weights are kept unpacked as well (`trimtab.adapt.unpacked`)."""

    @cached_property
    def trained(self) -> Trained:
        """Which weights are trained, and the bytes that follow from it."""
        return trained(self.shape, self.weights_dtype, self.gradient_dtype, self.lora, self.quantization)

    def changed(self, **changes: Any) -> Job:
        """A copy with other batch, tokens, policies or the like; what is trained stays, and is not worked out again."""
        assert changes.keys().isdisjoint(("shape", "weights_dtype", "gradient_dtype", "lora", "quantization"))
        other = dataclasses.replace(self, **changes)
        other.__dict__["trained"] = self.trained
        return other

    @property
    def layers(self) -> tuple[str, ...]:
        """The policy of each layer."""
        assert not self.policies or len(self.policies) == self.shape.num_layers
        return self.policies or ("none",) * self.shape.num_layers


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


def layer_bytes(job: Job, policy: str) -> spec_recompute.LayerBytes:
    """Bytes of one layer of a job under a policy."""
    return spec_recompute.layer_bytes(
        job.shape,
        policy,
        batch=job.batch,
        tokens=job.tokens,
        dtype=job.dtype,
        attention=job.attention,
        weights_dtype=job.weights_dtype,
        device=job.device,
        pointwise=job.pointwise,
        mlp_tiles=job.mlp_tiles,
        learning=job.trained.learning,
    )


@dataclass(frozen=True)
class Layers:
    """What the blocks of a job hold, whichever policies they have: worked out once, asked often."""

    of: dict[str, spec_recompute.LayerBytes]
    """By policy."""
    stream: int
    gradients: int
    """Of one layer, where they pile up during backward; 0 where those of earlier passes are there already."""
    beyond: dict[str, int]
    """By policy: the most that a layer holds in its backward pass, beyond what it kept."""
    cast: int
    """16-bit copies of a plain layer's weights, under autocast."""

    def kept(self, segments: Sequence[tuple[str, int]]) -> int:
        """Bytes from forward to backward; `segments` are (policy, layers), the first layers first."""
        total = sum((self.of[policy].kept + self._cast(policy)) * count for policy, count in segments)
        return total + self._resident(segments)

    def _cast(self, policy: str) -> int:
        return self.cast if policy == "none" else 0

    def _resident(self, segments: Sequence[tuple[str, int]]) -> int:
        """What was sent to the host last is still on the device, and used from there."""
        sent = [self.of[policy].resident for policy, count in segments if count and self.of[policy].host]
        return sent[-1] if sent else 0

    def backward(self, segments: Sequence[tuple[str, int]]) -> Iterator[tuple[int, int]]:
        """(layer, bytes held in its backward) where that may be the most: at both ends of each segment."""
        layer = sum(count for _, count in segments)
        kept, gradients = self.kept(segments), 0
        for policy, count in reversed(segments):
            if not count:
                continue
            one = self.of[policy]
            # Of inputs from the host, the one in use and the one on its way are counted with what comes back.
            resident = self._resident(segments) if one.host else 0
            for step in {0, count - 1}:
                held = kept - resident - (one.kept + self._cast(policy)) * step + self.beyond[policy]
                yield layer - 1 - step, held + gradients + self.gradients * step
            kept -= (one.kept + self._cast(policy)) * count
            gradients += self.gradients * count
            layer -= count


def layers_of(job: Job, gradients: int) -> Layers:
    """The layers of a job whose backward pass leaves so many bytes of gradients."""
    shape = job.shape
    head, embedding = job.trained.head, job.trained.named(EMBEDDING)
    matrices = 0 if job.in_backward else gradients - (0 if shape.tie_embeddings else head) - embedding
    update = _update_scratch(job) if job.in_backward else 0
    return Layers(
        of={policy: layer_bytes(job, policy) for policy in spec_recompute.POLICIES},
        stream=job.batch * job.tokens * shape.hidden_size * BYTES[_stream(job)],
        gradients=0 if job.accumulation > 1 else matrices // max(shape.num_layers, 1),
        beyond={policy: _beyond(job, policy, update) for policy in spec_recompute.POLICIES},
        cast=0 if job.lora else model_spec.cast_bytes(shape, job.dtype, job.weights_dtype),
    )


def segments_of(policies: Sequence[str]) -> list[tuple[str, int]]:
    """Runs of the same policy: ("a", "a", "b") → [("a", 2), ("b", 1)]."""
    return [(policy, len(list(run))) for policy, run in itertools.groupby(policies)]


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
    dense = _made_gradient(job, shape.vocab_size * shape.hidden_size) if embedding else 0
    update = _update_scratch(job) if job.in_backward else 0
    matrices = layers.gradients * shape.num_layers
    yield (
        "the embedding, at the end of backward",
        (earlier or matrices) + held + max(dense, update) + stream + kept,
    )
    yield "the optimizer step", 0 if job.in_backward else gradients + _update_scratch(job)


def _adapted_head(job: Job) -> int:
    """Bytes of the head with its adapter in it, made anew for each loss; one for each scaling of it (DoRA) as well."""
    if not job.trained.adapts_head:
        return 0
    copies = 2 if job.lora is not None and job.lora.use_dora else 1
    return copies * nbytes(job.weights_dtype, job.shape.vocab_size * job.shape.hidden_size)


def _stream(job: Job) -> str:
    """Format of the residual stream: under autocast that of the weights."""
    return job.weights_dtype if job.weights_dtype != job.dtype else job.dtype


def _made_gradient(job: Job, count: int) -> int:
    """A weight's gradient as backward makes it: in the weight's format, then cast if kept in another."""
    made = nbytes(job.weights_dtype, count)
    return made if job.weights_dtype == job.gradient_dtype else made + nbytes(job.gradient_dtype, count)


def _largest_gradient(job: Job, names: tuple[str, ...]) -> int:
    """Of the tensors on these layers of a block: the largest gradient as backward makes it."""
    return max((_made_gradient(job, p.count) for p in job.trained.in_block(names)), default=0)


def _beyond(job: Job, policy: str, update: int) -> int:
    """The most that a layer's backward holds beyond what the layer kept: what comes back, and the larger of its halves.

    Feed-forward goes first: the gradient of the product and one weight's, then, the product being freed,
    those of both its factors. Attention follows when all that the feed-forward kept is free again: gradients
    of o, q, k, v, one weight's, and the kernel's own. `update` is an optimizer's that steps in the backward.
    """
    shape, N, width = job.shape, job.batch * job.tokens, BYTES[job.dtype]
    C, I = shape.hidden_size, shape.intermediate_size  # noqa: E741
    H, K, D = shape.num_heads, shape.num_kv_heads, shape.head_dim
    back = layer_bytes(job, policy).working
    tiled = job.mlp_tiles > 1
    rows = spec_recompute.tile_rows(N, job.mlp_tiles) if tiled else N
    between = N * C * BYTES[_stream(job)]
    feed_forward = rows * I * width + max(rows * I * width, _largest_gradient(job, model_spec.MLP_LINEARS))
    kernel = 0
    if (
        job.device == "cuda" or job.attention not in attention_spec.TILED
    ):  # a CPU's tiled kernel has a tile a thread
        kernel = attention_spec.scratch_bytes(
            job.attention, job.batch, job.tokens, job.tokens, H, K, D, job.dtype
        )
    attention = (
        (2 * N * H * D + 2 * N * K * D) * width
        + kernel
        + _largest_gradient(job, model_spec.ATTENTION_LINEARS)
    )
    attention = max(attention - (between if tiled else (4 * N * I + N * C) * width), _turning(job), update)
    if tiled:
        feed_forward = _tiles_scratch(job, rows)
    unpacking = unpacking_bytes(job)
    if job.lora is not None:
        unpacking += adapt_spec.dropout_bytes(job.shape, job.lora, rows, job.dtype)
    if tiled and policy in ("pointwise", "selective"):
        return (
            max(feed_forward, back + attention) + unpacking
        )  # the tiles are done before the first half comes back
    return back + max(feed_forward, attention, update) + unpacking


def unpacking_bytes(job: Job) -> int:
    """What reading packed weights takes for a moment, besides the workspace."""
    if job.quantization is None:
        return 0
    packed = job.quantization
    return spec_quantized.scratch_bytes(
        job.shape,
        packed["kind"],
        impl=packed["impl"],
        block=packed["block"] or spec_quantized.BLOCK,
        double=packed["double"],
    )


def workspace_bytes(job: Job) -> int:
    """One dequantized weight, from the first product on."""
    return 0 if job.quantization is None else spec_quantized.workspace_bytes(job.shape, job.dtype)


def _turning(job: Job) -> int:
    """What composed rotary positions hold in fp32 while they are computed again, less what comes after them."""
    if job.pointwise == "triton":
        return 0
    shape, N, width = job.shape, job.batch * job.tokens, BYTES[job.dtype]
    H, K, D = shape.num_heads, shape.num_kv_heads, shape.head_dim
    # In 16 bits a copy, then four halves; beside them what goes in, before and after a norm.
    parts = N * H * D * (4 * 2 + (4 if width < 4 else 0))
    parts += N * (H + K) * D * width * (2 if shape.qk_norm and width < 4 else 1)
    later = N * (2 * H + K) * D * width + N * shape.hidden_size * BYTES[_stream(job)]
    return parts - later if job.mlp_tiles > 1 else 0


def _tiles_scratch(job: Job, rows: int) -> int:
    """Of a feed-forward in tiles of so many rows, beside the first half's.

    The whole input's gradient, weights' gradients added up in fp32, and either what one tile holds at its fullest (all
    it keeps, its output, the gradients of two factors and of one weight), or its weights' gradients, all made.
    """
    shape, width = job.shape, BYTES[job.dtype]
    stream = shape.hidden_size * BYTES[_stream(job)]
    learned = job.trained.in_block(model_spec.MLP_LINEARS)
    sums, made = nbytes("fp32", sum(p.count for p in learned)), sum(nbytes(p.dtype, p.count) for p in learned)
    largest = max((nbytes(p.dtype, p.count) for p in learned), default=0)
    tile = (
        layer_bytes(job, "none").tile + rows * stream + 2 * rows * shape.intermediate_size * width + largest
    )
    return job.batch * job.tokens * stream + sums + max(tile, made)


def _update_scratch(job: Job) -> int:
    return job.trained.update_scratch(job.optimizer, device=job.device, impl=job.optimizer_impl)
