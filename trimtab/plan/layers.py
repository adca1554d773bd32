"""What the blocks of a job hold between their passes, and in each one's backward pass. Imports no torch."""

# N tokens of a microbatch, C hidden size, I intermediate size, H heads, K key/value heads, D head size

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trimtab.adapt import spec as adapt_spec
from trimtab.adapt import spec_quantized, spec_recompute
from trimtab.adapt.targets import EMBEDDING
from trimtab.facts.dtypes import BYTES, nbytes
from trimtab.kernels.attention import spec as attention_spec
from trimtab.model import spec as model_spec
from trimtab.plan.job import Job


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
    update = update_scratch(job) if job.in_backward else 0
    return Layers(
        of={policy: layer_bytes(job, policy) for policy in spec_recompute.POLICIES},
        stream=job.batch * job.tokens * shape.hidden_size * BYTES[stream_dtype(job)],
        gradients=0 if job.accumulation > 1 else matrices // max(shape.num_layers, 1),
        beyond={policy: _beyond(job, policy, update) for policy in spec_recompute.POLICIES},
        cast=_casts(job),
    )


def segments_of(policies: Sequence[str]) -> list[tuple[str, int]]:
    """Runs of the same policy: ("a", "a", "b") → [("a", 2), ("b", 1)]."""
    return [(policy, len(list(run))) for policy, run in itertools.groupby(policies)]


def stream_dtype(job: Job) -> str:
    """Format of the residual stream: under autocast that of the weights."""
    return job.weights_dtype if job.weights_dtype != job.dtype else job.dtype


def made_gradient(job: Job, count: int) -> int:
    """A weight's gradient as backward makes it: in the weight's format, then cast if kept in another."""
    made = nbytes(job.weights_dtype, count)
    return made if job.weights_dtype == job.gradient_dtype else made + nbytes(job.gradient_dtype, count)


def _largest_gradient(job: Job, names: tuple[str, ...]) -> int:
    """Of the tensors on these layers of a block: the largest gradient as backward makes it."""
    return max((made_gradient(job, p.count) for p in job.trained.in_block(names)), default=0)


def _beyond(job: Job, policy: str, update: int) -> int:
    """The most that a layer's backward holds beyond what the layer kept: what comes back, and the larger of its halves.

    Feed-forward goes first: the gradient of the product and one weight's, then, the product being freed, those of
    both its factors, unless they are written over these. Attention follows when all that the feed-forward kept is free
    again: gradients of o, q, k, v, one weight's, and the kernel's own. `update` is an optimizer's that steps in the
    backward.
    """
    shape, N, width = job.shape, job.batch * job.tokens, BYTES[job.dtype]
    C, I = shape.hidden_size, shape.intermediate_size  # noqa: E741
    H, K, D = model_spec.heads_of(shape)
    back = layer_bytes(job, policy).working
    tiled = job.mlp_tiles > 1
    rows = spec_recompute.tile_rows(N, job.mlp_tiles) if tiled else N
    between = N * C * BYTES[stream_dtype(job)]
    words, dropped = _dropout(job, rows)
    factors = max(_after_product(job, policy) * rows * I * width, dropped)
    feed_forward = rows * I * width + max(factors, _largest_gradient(job, model_spec.MLP_LINEARS))
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
        + dropped
    )
    attention = max(
        attention - (between if tiled else _feed_forward_kept(job)), _turning(job, policy), update
    )
    if tiled:
        feed_forward = _tiles_scratch(job, rows)
    unpacking = unpacking_bytes(job) + words
    if policy != "none":
        unpacking += _casts(job)
    if job.quantization is not None and job.trained.learning.scaled:
        # DoRA measures the rows of a dequantized weight of its own, when no gradient of the layer's width is there yet.
        unpacking += max(0, C * I * width - rows * I * width)
    if tiled and policy in ("pointwise", "selective"):
        return (
            max(feed_forward, back + attention) + unpacking
        )  # the tiles are done before the first half comes back
    return back + max(feed_forward, attention, update) + unpacking


def _after_product(job: Job, policy: str) -> int:
    """Tensors of the feed-forward's width that the gradients of gate and up take, less the product if that is freed.

    In a pass that is computed again they are written over gate and up. That gains nothing where more is there at
    another moment: with DoRA on packed weights the gradients of base and adapter; with dropout, where products are
    kept, these beside their sums with the adapters'.
    """
    learning = job.trained.learning
    fresh = 1 if learning.keeps("down_proj") else 2
    if job.lora is not None and job.lora.lora_dropout and policy == "pointwise" and job.mlp_tiles == 1:
        return fresh + 1
    plain = policy == "none" or job.pointwise != "triton" or job.compiled or job.mlp_tiles > 1
    return fresh if plain or (job.quantization is not None and learning.scaled) else 0


def _dropout(job: Job, rows: int) -> tuple[int, int]:
    """`adapt_spec.dropout_bytes` of the adapters, if there are any."""
    return (0, 0) if job.lora is None else adapt_spec.dropout_bytes(job.shape, job.lora, rows, job.dtype)


def _feed_forward_kept(job: Job) -> int:
    """Of what a layer's feed-forward half kept, and attention's backward finds free: gate, up, the activation where it
    is not fused, the product and the norm's output where somebody learns from them."""
    shape, N, learning = job.shape, job.batch * job.tokens, job.trained.learning
    wide = (2 if job.pointwise == "triton" else 3) + learning.keeps("down_proj")
    narrow = learning.keeps("gate_proj", "up_proj")
    return N * (wide * shape.intermediate_size + narrow * shape.hidden_size) * BYTES[job.dtype]


def _casts(job: Job) -> int:
    """16-bit copies of a layer's weights that autograd keeps under autocast: of those that torch's own product reads.

    An adapted layer casts its weight anew in each pass; one with dropout has the base's product apart.
    """
    shape, lora = job.shape, job.lora
    whole = model_spec.cast_bytes(shape, job.dtype, job.weights_dtype)
    if lora is None or not whole:
        return whole
    if job.quantization is not None:
        return 0
    names = model_spec.ATTENTION_LINEARS + model_spec.MLP_LINEARS
    plain = [name for name in names if lora.lora_dropout or name not in job.trained.learning.ranks]
    return sum(nbytes(job.dtype, model_spec.linear_of(shape, name).weights) for name in plain)


def unpacking_bytes(job: Job) -> int:
    """What reading packed weights takes for a moment, besides the workspace."""
    if job.quantization is None:
        return 0
    packed = job.quantization
    return spec_quantized.scratch_bytes(
        job.shape,
        packed.kind,
        impl=packed.impl,
        block=packed.block_size,
        double=packed.double,
    )


def workspace_bytes(job: Job) -> int:
    """One dequantized weight, from the first product on."""
    return 0 if job.quantization is None else spec_quantized.workspace_bytes(job.shape, job.dtype)


def _turning(job: Job, policy: str) -> int:
    """What composed rotary positions hold in fp32 while they, or their gradients, are computed, less what comes after
    them, or was freed before."""
    if job.pointwise == "triton" or job.mlp_tiles == 1:
        return 0
    shape, N, width = job.shape, job.batch * job.tokens, BYTES[job.dtype]
    H, K, D = model_spec.heads_of(shape)
    # In 16 bits a copy, then four halves; beside them what goes in, before and after a norm.
    parts = N * H * D * (4 * 2 + (4 if width < 4 else 0))
    parts += N * (H + K) * D * width * (2 if shape.attention.qk_norm and width < 4 else 1)
    # The gradient that came in stands where the stream between the halves will, or was.
    attended = policy not in ("none", "block", "offload") and job.attention in attention_spec.TILED
    return parts - N * (H + K + (0 if attended else H)) * D * width


def _tiles_scratch(job: Job, rows: int) -> int:
    """Of a feed-forward in tiles of so many rows, beside the first half's.

    The whole input's gradient, weights' gradients added up in fp32, and either what one tile holds at its fullest (all
    it keeps, its output, the gradients of two factors and of one weight), or its weights' gradients, all made.
    """
    shape, width = job.shape, BYTES[job.dtype]
    stream = shape.hidden_size * BYTES[stream_dtype(job)]
    learned = job.trained.in_block(model_spec.MLP_LINEARS)
    sums, made = nbytes("fp32", sum(p.count for p in learned)), sum(nbytes(p.dtype, p.count) for p in learned)
    largest = max((nbytes(p.dtype, p.count) for p in learned), default=0)
    wide = (1 + _after_product(job, "none")) * rows * shape.intermediate_size * width
    tile = layer_bytes(job, "none").tile + rows * stream + wide + largest
    return job.batch * job.tokens * stream + sums + max(tile, made)


def update_scratch(job: Job) -> int:
    """Most bytes held for a moment while one parameter is updated."""
    return job.trained.update_scratch(job.optimizer, device=job.device, impl=job.optimizer_impl)
