"""Memory of passes without gradients: the loss on evaluation text, the probe, generation. Imports no torch.

The blocks have the operations declared for training. Nothing is saved for backward, so each layer allocates only its
temporary tensors. Legend: B rows, T tokens of a pass, S tokens in the cache, N = B · T, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trimtab.data import spec as data_spec
from trimtab.facts.blocks import AttentionShape, BlockShape
from trimtab.facts.dtypes import BYTES, nbytes
from trimtab.facts.operations import Activation, MemoryPart, Operation, OperationKind
from trimtab.kernels.attention import spec as attention_spec
from trimtab.kernels.linear_cross_entropy import schedule as loss_schedule
from trimtab.kernels.linear_cross_entropy import spec as loss_spec
from trimtab.model import spec as model_spec
from trimtab.model.spec_block import BLOCK_INPUT, DeclaredBlock
from trimtab.model.spec_operations import Execution
from trimtab.plan.job import Job
from trimtab.plan.layers import declared_blocks, dequantize_scratch_bytes, stream_dtype, workspace_bytes
from trimtab.plan.liveness import walk_forward

Tensors = list[Activation]

CACHE_BLOCK = 256
"""Tokens per allocation step of the KV cache (`trimtab.generate.cache`)."""
PREFILL_TOKENS = 8192
"""Tokens per prefill pass over several prompts (`trimtab.generate.loop`)."""


def total(tensors: Tensors) -> int:
    """Returns the bytes of all tensors."""
    return sum(tensor.nbytes for tensor in tensors)


def loss_tensors(job: Job) -> Tensors:
    """Returns the tensors live at the peak of a per-token loss over one batch, without weights and optimizer states."""
    forward = [*_inputs(job), *_shared(job), *_layer(job)]
    # RoPE's cos and sin are freed after the forward pass; the document layout belongs to the caller.
    masks = _shared(job)[0].nbytes - _shared(job.changed(**_UNMASKED))[0].nbytes
    loss = [*_inputs(job), Activation("masks", masks, MemoryPart.INPUTS), *_loss(job)]
    return max(forward, loss, key=total) + _dequantized(job)


_UNMASKED = {"attention": "triton", "layer_attention": (), "packed": False}
"""A change to an attention backend without a mask."""


def generation_tensors(job: Job, rows: int, prompt: int, new_tokens: int) -> Tensors:
    """Returns the tensors live at the peak of generation, without weights and optimizer states.

    Args:
        job: the model and how it runs; its batch and tokens are ignored.
        rows: prompts per batch.
        prompt: tokens of the longest prompt.
        new_tokens: the maximum number of generated tokens.
    """
    chunk = prompt if rows == 1 else min(prompt, max(PREFILL_TOKENS // rows, 1))
    cached = cache_tokens(rows, prompt, prompt)
    prefill_job = job.changed(batch=rows, tokens=chunk, packed=False, mlp_tiles=1, policies=())
    cache = _cache(job, rows, cached)
    last = []
    if chunk == prompt:  # a layer's part of the cache is allocated after its keys and values
        size = rows * cached * cache_width(job.shape.blocks[-1]) * BYTES[job.dtype]
        last = [Activation("cache.last", size, MemoryPart.CACHE)]
        cache = [Activation("cache", total(cache) - size, MemoryPart.CACHE)]
    mask = _mask(prefill_job, min(prompt, cached), padded=rows > 1)
    prefill = [*cache, *_inputs(prefill_job), *_shared(prefill_job), *mask, *_layer(prefill_job, last)]
    decode_job = job.changed(batch=rows, tokens=1, packed=False, mlp_tiles=1, policies=())
    final_cached = cache_tokens(rows, prompt, prompt + new_tokens)
    grown_cache = _cache(job, rows, final_cached)
    if final_cached > cached:  # one layer's keys or values are copied to a larger buffer
        widest = max(cache_width(block) for block in job.shape.blocks)
        size = rows * cached * widest * BYTES[job.dtype] // 2
        grown_cache = [*grown_cache, Activation("cache.copied", size, MemoryPart.CACHE)]
    step = [
        *grown_cache,
        *_inputs(decode_job),
        *_mask(decode_job, final_cached, padded=rows > 1),
        *_layer(decode_job),
    ]
    logits = [*grown_cache, *_inputs(decode_job), *_logits(decode_job)]
    return max(prefill, step, logits, key=total) + _dequantized(job)


def cache_tokens(rows: int, prompt: int, tokens: int) -> int:
    """Returns the capacity in tokens of a KV cache after a prompt and generation up to `tokens` in total.

    It grows to the needed size or by half, whichever is larger, rounded up to blocks.

    Example:
        >>> cache_tokens(64, 100, 164), cache_tokens(1, 300, 428), cache_tokens(1, 300, 600)
        (256, 512, 768)
    """
    chunk = prompt if rows == 1 else max(PREFILL_TOKENS // rows, 1)
    capacity = length = 0
    while length < tokens:
        needed = min(length + chunk, prompt) if length < prompt else capacity + 1
        if needed > tokens:
            break
        if needed > capacity:
            before = length if length < prompt else capacity
            capacity = -(-max(needed, before + before // 2) // CACHE_BLOCK) * CACHE_BLOCK
        length = needed if length < prompt else capacity
    return capacity


def cache_width(block: BlockShape) -> int:
    """Returns the elements that a layer caches per token: keys and values, or their latent (MLA).

    Example:
        >>> from trimtab.facts.blocks import FeedForwardShape
        >>> cache_width(BlockShape(AttentionShape(32, 8, 128), FeedForwardShape(14336)))
        2048
    """
    mixer = block.mixer
    if isinstance(mixer, AttentionShape):
        return 2 * mixer.kv_size
    return mixer.kv_rank + mixer.rope_head_dim


def _inputs(job: Job) -> Tensors:
    size = data_spec.batch_bytes(job.batch, job.tokens)
    return [Activation("batch", size, MemoryPart.INPUTS)]


def _shared(job: Job) -> Tensors:
    run = Execution(job.batch, job.tokens, job.dtype, job.attention)
    size = model_spec.shared_bytes(job.shape, run, job.attention_backends, packed=job.packed)
    return [Activation("positions and masks", size, MemoryPart.INPUTS)]


def _dequantized(job: Job) -> Tensors:
    size = workspace_bytes(job) + dequantize_scratch_bytes(job)
    return [Activation("dequantized weight", size, MemoryPart.WORKSPACE)] if size else []


def _layer(job: Job, from_attention: Sequence[Activation] = ()) -> Tensors:
    """The live tensors at the layer and operation with the highest memory."""
    blocks = declared_blocks(job)
    return max((tensors for block, _ in blocks for tensors in _instants(block, from_attention)), key=total)


def _instants(block: DeclaredBlock, from_attention: Sequence[Activation]) -> Iterator[Tensors]:
    """Live tensors of a block during each operation; the caller keeps its input alive until the block ends.

    Args:
        block: the block's operations.
        from_attention: other tensors, live from attention on.
    """
    reached_attention = False
    operations = block.attention if block.tile else block.operations
    x = operations[0].inputs[0]
    for instant in walk_forward(operations, frozenset(), [x], {BLOCK_INPUT}):
        assert instant.operation is not None
        reached_attention |= instant.operation.kind is OperationKind.ATTENTION
        tensors = instant.tensors() + _internal_tensors(instant.operation, instant.tensors())
        yield [*tensors, *from_attention] if reached_attention else tensors
    if not block.tile:
        return
    residual, output = block.tile[0].inputs[0], block.feed_forward[-1].outputs[0]
    live = [x, Activation("between.whole", output.nbytes, MemoryPart.RESIDUAL), output]
    for instant in walk_forward(block.tile, frozenset(), [], set()):
        assert instant.operation is not None
        tile = [
            Activation(f"tile.{tensor.name}", tensor.nbytes, tensor.part)
            for tensor in instant.tensors() + _internal_tensors(instant.operation, instant.tensors())
            if tensor.name != residual.name  # a view of the full tensor
        ]
        yield live + tile


def _internal_tensors(operation: Operation, live: Tensors) -> Tensors:
    """Tensors that training would save beyond an operation's inputs and outputs; here freed with the operation."""
    if operation.kind is OperationKind.ATTENTION and not operation.results:
        # Without tiling: the matrices are its scratch; keys and values are repeated for all query heads.
        return [Activation("repeated keys and values", 2 * operation.outputs[0].nbytes, MemoryPart.ATTENTION)]
    names = {tensor.name for tensor in live} | {tensor.name for tensor in operation.inputs}
    internal = {
        saved.activation.name: saved.activation
        for saved in operation.saved
        if saved.activation.name not in names
    }
    return list(internal.values())


def _loss(job: Job) -> Tensors:
    """Hidden states, and the logits of one chunk of tokens."""
    N, C, V = job.batch * job.tokens, job.shape.hidden_size, job.shape.vocab_size
    width = BYTES[job.dtype]
    hidden = Activation("norm", N * C * BYTES[stream_dtype(job)], MemoryPart.NORMS)
    if job.loss_impl == "reference":
        size = loss_spec.scratch_bytes("reference", N, C, V, job.dtype)
    elif job.loss_impl == "triton":
        plan = loss_schedule.schedule(
            N, C, V, width, BYTES[job.gradient_dtype],
            memory_bytes=job.loss_memory, weight_grad=job.trained.head_gradient_bytes > 0 or job.trained.adapts_head,
        )  # fmt: skip
        size = plan.rows * loss_schedule.row_stride(V) * width + 12 * N
    else:
        # Logits and log-probabilities of a chunk, and five values per token of it; labels, their mask, losses,
        # log-probabilities and log-sum-exps of all tokens.
        size = loss_spec.chunk_tokens(N, V) * (V * (width + 4) + 20) + N * (8 + 1 + 12)
    if stream_dtype(job) != job.dtype:  # autocast copies hidden states and head
        size += (N + V) * C * width
    return [hidden, Activation("logits", size, MemoryPart.LOSS), *_adapted_head(job)]


def _adapted_head(job: Job) -> Tensors:
    if not job.trained.adapts_head:
        return []
    size = nbytes(job.weights_dtype, job.shape.vocab_size * job.shape.hidden_size)
    return [Activation("head with its adapter", size, MemoryPart.LOSS)]


def _cache(job: Job, rows: int, tokens: int) -> Tensors:
    """Keys and values of all layers; an upper bound for layers with sliding-window attention."""
    width = sum(cache_width(block) for block in job.shape.blocks)
    return [Activation("cache", rows * tokens * width * BYTES[job.dtype], MemoryPart.CACHE)]


def _mask(job: Job, keys: int, *, padded: bool) -> Tensors:
    """The attention mask, for backends that read one and padded prompts; built for each layer."""
    if not padded or not any(impl in attention_spec.MASKED for impl in job.attention_backends):
        return []
    size = job.batch * job.tokens * (-(-keys // 8) * 8) * BYTES[job.dtype]
    return [Activation("mask", size, MemoryPart.INPUTS)]


def _logits(job: Job) -> Tensors:
    """Logits of the last token of each row: the matmul's output, its fp32 copy, and the previous token's."""
    V, width = job.shape.vocab_size, BYTES[job.dtype]
    size = job.batch * V * (4 + width + (4 if width < 4 else 0))
    if stream_dtype(job) != job.dtype:  # autocast copies the head
        size += (job.batch + V) * job.shape.hidden_size * width
    return [Activation("logits", size, MemoryPart.LOSS), *_adapted_head(job)]
