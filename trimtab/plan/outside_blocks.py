"""Memory of a step outside its transformer blocks: inputs, loss, final norm, embedding, optimizer. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trimtab.adapt.targets import EMBEDDING
from trimtab.data import spec as data_spec
from trimtab.facts.dtypes import BYTES, nbytes
from trimtab.facts.operations import Activation, MemoryPart, saved_activations
from trimtab.kernels.linear_cross_entropy import spec as loss_spec
from trimtab.model import spec as model_spec
from trimtab.model.spec_operations import Execution
from trimtab.plan.job import Job
from trimtab.plan.layers import Layers, update_scratch, workspace_bytes
from trimtab.plan.liveness import ParameterGradients, activation_gradients, walk_backward, workspace

Tensors = list[Activation]


@dataclass(frozen=True)
class TensorsOutsideBlocks:
    """Live tensors outside the blocks in each phase of a step, without weights and optimizer states."""

    layers_forward: Tensors
    loss_forward: Tensors
    loss_backward: Tensors
    final_norm_backward: Tensors
    layers_backward: Tensors
    embedding_gradient: Tensors
    """While the embedding's gradient is computed."""
    embedding_cast: Tensors
    """While it is cast to the dtype of accumulated gradients, if that differs."""
    optimizer_step: Tensors

    @property
    def embedding_backward(self) -> Tensors:
        """The larger of both."""
        return max(
            self.embedding_gradient, self.embedding_cast, key=lambda live: sum(item.nbytes for item in live)
        )


def tensors_outside_blocks(job: Job, gradients: int, layers: Layers) -> TensorsOutsideBlocks:
    """Returns the live tensors of a step outside its blocks.

    Args:
        job: the training job.
        gradients: bytes of all parameter gradients after a backward pass.
        layers: the job's blocks.
    """
    shape = job.shape
    persistent = _named("dequantized weight", workspace_bytes(job), MemoryPart.WORKSPACE)
    accumulated = _gradients("gradients", gradients) if job.accumulation > 1 else []
    final = job.trained.final_norm
    run = Execution(
        job.batch, job.tokens, job.dtype, job.attention, job.weights_dtype, job.device, job.pointwise,
        {} if final is None else {"norm.weight": final},
    )  # fmt: skip
    # The loader returns all batches of the step on the host; only the current microbatch is on the device.
    batch = _named("batch", data_spec.batch_bytes(job.batch, job.tokens), MemoryPart.INPUTS)
    shared = model_spec.shared_bytes(shape, run, job.attention_backends, packed=job.packed)
    inputs = batch + _named("positions and masks", shared, MemoryPart.INPUTS)
    norm = model_spec.final_norm(shape, run)
    saved = {item.name: item for item in saved_activations([norm], {norm.inputs[0].name})}
    stream = layers.stream
    loss_forward, loss_backward = _loss(job, run, stream)
    live = [*persistent, *accumulated, *inputs, *saved.values()]
    # From here on the head's gradient is live too; with tied embeddings until the embedding's gradient is added.
    head = job.trained.head_gradient_bytes
    head_gradient = head if shape.tie_embeddings else (0 if accumulated or job.in_backward else head)
    live_after_loss = [*persistent, *accumulated, *inputs, *_gradients("head", head_gradient)]
    walk = walk_backward(
        [norm], frozenset({norm.inputs[0].name}), saved, norm.outputs[0], ParameterGradients(retain=False)
    )
    candidates = [(item.total, item.tensors()) for item in walk]
    # The embedding's gradient is dense, computed in the weights' dtype, and added to the accumulated gradient. Until it
    # is cast, its operator also holds the gradient of its output; what the layers share is freed.
    stored = job.trained.module_gradient_bytes(EMBEDDING)
    dense = nbytes(job.weights_dtype, shape.vocab_size * shape.hidden_size) if stored else 0
    cast = _gradients("embedding.cast", stored if job.weights_dtype != job.gradient_dtype else 0)
    computed = _gradients("embedding", dense)
    update = update_scratch(job) if job.in_backward else 0
    if update > sum(item.nbytes for item in computed + cast):
        computed, cast = workspace("optimizer", update), []
    layer_gradients = accumulated or _gradients("layers", layers.gradients())
    live_at_embedding = [
        *persistent, *layer_gradients, *_gradients("head", head_gradient), *computed, *batch,
        *activation_gradients({"x": stream}),
    ]  # fmt: skip
    return TensorsOutsideBlocks(
        layers_forward=[*persistent, *accumulated, *inputs],
        loss_forward=live + loss_forward,
        loss_backward=live + loss_backward,
        final_norm_backward=live_after_loss + max(candidates, key=lambda item: item[0])[1],
        layers_backward=live_after_loss,
        embedding_gradient=[*live_at_embedding, *workspace("embedding", _embedding_scratch(job))],
        embedding_cast=[*live_at_embedding, *cast],
        optimizer_step=persistent if job.in_backward else [
            *persistent, *_gradients("gradients", gradients), *workspace("optimizer", update_scratch(job)),
        ],
    )  # fmt: skip


SORTED_TOKENS = 3072
"""Above this many tokens torch's embedding backward on CUDA sorts them (`aten/src/ATen/native/cuda/Embedding.cu`)."""


def _embedding_scratch(job: Job) -> int:
    """Temporary bytes of the embedding's gradient on CUDA: per token a row in fp32 and six 8-byte integers.

    (`EmbeddingBackwardKernel.cu`. Measured on an H200 with 4096 tokens of 1024: 16.4 MiB.)
    """
    tokens = job.batch * job.tokens
    if job.device == "cpu" or tokens <= SORTED_TOKENS or not job.trained.module_gradient_bytes(EMBEDDING):
        return 0
    return tokens * (4 * job.shape.hidden_size + 6 * 8)


def _loss(job: Job, run: Execution, stream: int) -> tuple[Tensors, Tensors]:
    """Live tensors of the loss at the end of forward and in backward, without the final norm's saved activations."""
    shape, N = job.shape, job.batch * job.tokens
    dims = (N, shape.hidden_size, shape.vocab_size)
    adapted = _adapted_head(job)
    head = job.trained.head_gradient_bytes
    head_gradient = job.weights_dtype if adapted else job.gradient_dtype
    options: dict[str, Any] = {
        "memory_bytes": job.loss_memory,
        "gradient_dtype": job.dtype if run.autocast else head_gradient,
        "weight_grad": head > 0 or adapted > 0,
    }
    loss = loss_spec.saved_bytes(job.loss_impl, *dims, job.dtype, **options)
    chunk = loss_spec.scratch_bytes(job.loss_impl, *dims, job.dtype, **options)
    if run.autocast:  # autocast copies hidden states and head for the loss
        chunk += (N + shape.vocab_size) * shape.hidden_size * BYTES[job.dtype]
    ready = loss_spec.computes_gradients_in_forward(job.loss_impl, *dims, job.dtype, **options)
    saved = _named("loss", loss, MemoryPart.LOSS)
    norm, logits = _named("norm", stream, MemoryPart.NORMS), _named("logits", chunk, MemoryPart.LOSS)
    # Gradients computed with the loss are saved ("triton": in their final dtype). Otherwise the logits are
    # recomputed from the saved hidden states.
    gradients = activation_gradients({"norm": stream})
    gradients += _gradients("head", head) if head >= adapted else activation_gradients({"head": adapted})
    if ready and job.loss_impl == "triton" and not run.autocast:
        hidden = nbytes(job.dtype, N * shape.hidden_size)
        saved = _named(gradients[0].name, hidden, MemoryPart.LOSS)
        saved += [
            item
            for gradient in gradients[1:]
            for item in _named(gradient.name, loss - hidden, MemoryPart.LOSS)
        ]
        gradients = []
    merged = _named("head with its adapter", adapted, MemoryPart.LOSS)
    forward = norm + merged + saved + logits
    return forward, merged + saved + gradients + ([] if ready else norm + logits)


def _adapted_head(job: Job) -> int:
    """Bytes of the head with its adapter merged, built for each loss; DoRA needs a second, scaled copy."""
    if not job.trained.adapts_head:
        return 0
    copies = 2 if job.lora is not None and job.lora.use_dora else 1
    return copies * nbytes(job.weights_dtype, job.shape.vocab_size * job.shape.hidden_size)


def _named(name: str, size: int, part: MemoryPart) -> Tensors:
    return [Activation(name, size, part)] if size else []


def _gradients(name: str, size: int) -> Tensors:
    return _named(f"{name}.parameter_gradients", size, MemoryPart.PARAMETER_GRADIENTS)
