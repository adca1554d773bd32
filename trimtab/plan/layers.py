"""Memory of a job's blocks: saved activations, and the peak of each forward and backward pass. Imports no torch.

All figures are sums over the operations that the blocks declare (`trimtab.model.spec_block`).
`trimtab.adapt.spec_recompute` defines which activations a recompute policy saves.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from trimtab.adapt import spec_quantized
from trimtab.adapt.spec_linears import AdaptedProjections
from trimtab.adapt.spec_recompute import (
    IN_HALVES,
    OFFLOADING,
    last_recomputed,
    saved_under,
    tile_rows,
)
from trimtab.facts.dtypes import BYTES
from trimtab.facts.operations import Activation, MemoryPart, Operation, saved_activations, total_bytes
from trimtab.model.spec_block import ATTENTION_RESIDUAL, BLOCK_INPUT, DeclaredBlock, declare_block
from trimtab.model.spec_operations import Execution
from trimtab.plan.job import Job
from trimtab.plan.liveness import (
    Instant,
    ParameterGradients,
    activation_gradients,
    branch_gradient,
    gradient_bytes,
    parameter_gradients,
    walk_backward,
    walk_forward,
)

Segments = Sequence[tuple[str, int]]
"""(policy, number of layers), from the first layer to the last."""


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of one layer under a policy."""

    on_device: int
    """Saved activations on the device, from the forward pass to the layer's backward."""
    forward: int
    """Peak of the layer's forward pass, including its input."""
    backward: int
    """Peak of the layer's backward pass: saved, recomputed and reloaded activations, and gradients."""
    gradients: int
    """Gradients of its trainable parameters, if they are retained during backward."""
    host: int = 0
    """Offloaded activations in pinned host memory."""


def declared_blocks(job: Job) -> list[tuple[DeclaredBlock, range]]:
    """Returns (declared block, layers) for each group of consecutive equal layers; those of one kind share a block."""
    kinds = layer_kinds(job)
    blocks: dict[int, DeclaredBlock] = {}
    for layer, kind in enumerate(kinds):
        if kind not in blocks:
            blocks[kind] = declare_layer(job, layer)
    return [(blocks[kinds[group[0]]], group) for group in _groups(kinds)]


def layer_groups(job: Job) -> Iterator[range]:
    """Yields ranges of consecutive layers with equal blocks, attention backends, trainable parameters and input
    gradients."""
    yield from _groups(layer_kinds(job))


def _groups(kinds: Sequence[int]) -> Iterator[range]:
    start = 0
    for _, group in itertools.groupby(kinds):
        stop = start + len(list(group))
        yield range(start, stop)
        start = stop


def layer_kinds(job: Job) -> list[int]:
    """Returns an id per layer; equal layers have the same id."""
    kinds = zip(
        job.shape.block_kinds,
        job.attention_backends,
        job.trained.layer_kinds,
        inputs_require_grad(job),
        strict=True,
    )
    ids: dict[object, int] = {}
    return [ids.setdefault(kind, len(ids)) for kind in kinds]


def inputs_require_grad(job: Job) -> Iterator[bool]:
    """Yields whether each layer's input requires grad: parameters below are trained, or layers are compiled."""
    below = job.compiled or job.trained.trains_embedding
    for parameters in job.trained.layers:
        yield below
        below = below or bool(parameters)


def num_tiles(job: Job) -> int:
    """Returns the number of tiles in which the feed-forward runs."""
    tokens = job.batch * job.tokens
    return -(-tokens // tile_rows(tokens, job.mlp_tiles))


def declare_layer(job: Job, layer: int) -> DeclaredBlock:
    """Returns the declared operations of one layer of a job."""
    adapted = None
    if job.lora is not None or job.quantization is not None:
        adapted = AdaptedProjections(job.lora, job.quantization)
    tokens = job.batch * job.tokens
    return declare_block(
        job.shape.blocks[layer],
        job.shape.hidden_size,
        Execution(
            job.batch,
            job.tokens,
            job.dtype,
            job.attention_backends[layer],
            job.weights_dtype,
            job.device,
            job.pointwise,
            {parameter.name: parameter.gradient for parameter in job.trained.layers[layer]},
            job.attended_share,
        ),
        adapted,
        input_requires_grad=next(itertools.islice(inputs_require_grad(job), layer, None)),
        tile_tokens=tile_rows(tokens, job.mlp_tiles) if job.mlp_tiles > 1 else None,
    )


def layer_memory(job: Job, block: DeclaredBlock, policy: str) -> LayerMemory:
    """Returns the memory of one layer of a job under a policy.

    On a CPU the offloading policies leave saved activations where they are; `offload` is then the same as `block`.
    """
    saved = saved_under(block, policy)
    size = total_bytes(saved)
    gradients = gradient_bytes(block.operations) if _parameter_gradients(job).retain else 0
    backward = max((instant.total for instant in backward_instants(job, block, policy)), default=0)
    forward = max(instant.total for instant in forward_instants(block, policy))
    if is_offloaded(job, policy):
        # At the same time the offloaded activations of the layer below are copied to or from the host.
        return LayerMemory(0, forward + size, backward + size, gradients, size)
    return LayerMemory(size, forward, backward, gradients)


def is_offloaded(job: Job, policy: str) -> bool:
    """Returns whether a layer's saved activations are in host memory between forward and backward."""
    return policy in OFFLOADING and job.device != "cpu"


def forward_instants(block: DeclaredBlock, policy: str) -> Iterator[Instant]:
    """Yields the live tensors during a layer's forward pass, including its input and saved activations."""
    saved = saved_under(block, policy)
    operations = block.attention if block.tile else block.operations
    x, saved_names = operations[0].inputs[0], {activation.name for activation in saved}
    yield from walk_forward(operations, block.requires_grad, [x], saved_names)
    if block.tile:
        residual, output = block.tile[0].inputs[0], block.feed_forward[-1].outputs[0]
        live = [*saved, output]
        if ATTENTION_RESIDUAL not in saved_names:
            live.append(dataclasses.replace(output, name=f"{ATTENTION_RESIDUAL}.whole"))
        for instant in walk_forward(block.tile, frozenset(), [residual], set()):
            yield _with_tensors(instant, live, "tile.")


def backward_instants(job: Job, block: DeclaredBlock, policy: str) -> Iterator[Instant]:
    """Yields the live tensors during a layer's backward pass: saved, recomputed or reloaded activations, and gradients
    starting with that of its output."""
    if not block.differentiates:
        return
    saved = saved_under(block, policy)
    if block.tile:
        yield from _tiled_backward_instants(job, block, policy, saved)
        return
    operations, requires_grad = block.operations, block.requires_grad
    output = operations[-1].outputs[0]
    output_gradients = _output_gradients(operations[-1])
    yield _with_tensors(Instant(None, 0, list), [*saved, *output_gradients])
    available: Mapping[str, Activation] = {activation.name: activation for activation in saved}
    if policy != "none":
        recomputed = operations[: last_recomputed(block, policy) + 1]
        needed = {
            BLOCK_INPUT,
            *(activation.name for activation in saved_activations(operations, requires_grad)),
        }
        for instant in walk_forward(recomputed, requires_grad, saved, needed):
            yield _with_tensors(instant, output_gradients)
            available = instant.after
    overwrites = policy != "none" and not job.compiled
    yield from walk_backward(
        operations, requires_grad, available, output, _parameter_gradients(job), recomputed=overwrites
    )


def _with_tensors(instant: Instant, tensors: Sequence[Activation], prefix: str = "") -> Instant:
    """Adds live tensors to an instant; the names of its own tensors get a prefix."""
    total = instant.total + sum(tensor.nbytes for tensor in tensors)
    return instant._replace(total=total, tensors=partial(_all_tensors, instant, tensors, prefix))


def _all_tensors(instant: Instant, tensors: Sequence[Activation], prefix: str) -> list[Activation]:
    own = instant.tensors()
    if prefix:
        own = [dataclasses.replace(tensor, name=prefix + tensor.name) for tensor in own]
    return [*tensors, *own]


def _output_gradients(addition: Operation) -> list[Activation]:
    """The gradient of a residual addition's output, and of the added branch if that has another dtype."""
    output = addition.outputs[0]
    gradients = activation_gradients({output.name: output.nbytes})
    branch = branch_gradient(addition)
    return gradients + (activation_gradients({f"{output.name}.branch": branch}) if branch else [])


def _parameter_gradients(job: Job) -> ParameterGradients:
    return ParameterGradients(
        job.accumulation == 1 and not job.in_backward, update_scratch(job) if job.in_backward else 0
    )


def _tiled_backward_instants(
    job: Job, block: DeclaredBlock, policy: str, saved: Sequence[Activation]
) -> Iterator[Instant]:
    """The backward pass of a layer with a tiled feed-forward: first the tiles, then the attention half."""
    requires_grad = block.requires_grad
    needed_by_attention = {
        activation.name: activation for activation in saved_activations(block.attention, requires_grad)
    }
    residual = block.attention[-1].outputs[0]
    needed = {BLOCK_INPUT, *needed_by_attention}
    available: Mapping[str, Activation] = {activation.name: activation for activation in saved}
    recompute = policy != "none"
    recomputed = block.attention[: last_recomputed(block, policy) + 1]
    output_gradient = activation_gradients({f"{ATTENTION_RESIDUAL}.output": residual.nbytes})
    if recompute and policy not in IN_HALVES:  # the attention half is recomputed before the tiles run
        for instant in walk_forward(recomputed, requires_grad, saved, needed | {ATTENTION_RESIDUAL}):
            yield _with_tensors(instant, output_gradient)
            available = instant.after
    # The gradients of output and input of the feed-forward half, and one tile.
    residual_gradients = [*output_gradient, *activation_gradients({residual.name: residual.nbytes})]
    for instant in _tile_instants(block):
        yield _with_tensors(instant, [*available.values(), *residual_gradients])
    retain = _parameter_gradients(job).retain
    computed = (
        [gradient for operation in block.feed_forward for gradient in operation.gradients] if retain else []
    )
    feed_forward_gradients = parameter_gradients(computed)
    if recompute and policy in IN_HALVES:
        gradients = [*_output_gradients(block.attention[-1]), *feed_forward_gradients]
        for instant in walk_forward(recomputed, requires_grad, saved, needed):
            yield _with_tensors(instant, gradients)
            available = instant.after
    available = {
        name: activation
        for name, activation in available.items()
        if name in needed_by_attention or name == BLOCK_INPUT
    }
    for instant in walk_backward(
        block.attention, requires_grad, available, residual, _parameter_gradients(job)
    ):
        yield _with_tensors(instant, feed_forward_gradients)


def _tile_instants(block: DeclaredBlock) -> Iterator[Instant]:
    """Memory of the tiles in addition to the input's gradient: fp32 sums of weight gradients, and one tile.

    A tile reads a view of the residual stream, and its weight gradients stay allocated until all are computed.
    """
    requires_grad = block.requires_grad
    saved = {
        activation.name: activation
        for activation in saved_activations(block.tile, requires_grad)
        if activation.name != ATTENTION_RESIDUAL
    }
    output = block.tile[-1].outputs[0]
    sums = [
        Activation(f"{gradient.name}.sum", 4 * math.prod(gradient.dims), MemoryPart.PARAMETER_GRADIENTS)
        for operation in block.tile
        for gradient in operation.gradients
    ]
    yield _with_tensors(Instant(None, 0, list), sums)
    for instant in walk_backward(block.tile, requires_grad, saved, output, ParameterGradients()):
        yield _with_tensors(instant, sums, "tile.")


@dataclass(frozen=True)
class AllLayersMemory:
    """Memory of all layers of a job under their policies."""

    on_device: int
    """Saved activations on the device, from forward to backward."""
    host: int
    """Offloaded activations in pinned host memory."""
    forward: tuple[tuple[int, int], ...]
    """(layer, bytes live in its forward pass) at possible peaks: the end of each group of equal layers."""
    backward: tuple[tuple[int, int], ...]
    """(layer, bytes live in its backward pass) at possible peaks: both ends of each group of equal layers."""


class Layers:
    """Memory of a job's blocks under any recompute policies, computed on demand and cached."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.blocks = declared_blocks(job)
        """(declared block, layers) for each group of consecutive equal layers."""
        self.stream = job.batch * job.tokens * job.shape.hidden_size * BYTES[stream_dtype(job)]
        """Bytes of the residual stream, and of its gradient."""
        self._dequantize_scratch = dequantize_scratch_bytes(job)
        self._found: dict[tuple[int, str], LayerMemory] = {}
        """By id of the declared block, which groups of the same kind share, and policy."""

    def of(self, group: int, policy: str) -> LayerMemory:
        """Returns the memory of one layer of a group of equal layers under a policy, including buffers to dequantize
        weights."""
        block = self.blocks[group][0]
        memory = self._found.get((id(block), policy))
        if memory is None:
            memory = layer_memory(self.job, block, policy)
            if memory.backward:
                memory = dataclasses.replace(memory, backward=memory.backward + self._dequantize_scratch)
            self._found[id(block), policy] = memory
        return memory

    def gradients(self) -> int:
        """Returns the bytes of all layers' parameter gradients, if they are retained during backward."""
        if not _parameter_gradients(self.job).retain:
            return 0
        return sum(gradient_bytes(block.operations) * len(indices) for block, indices in self.blocks)

    def spans(self, segments: Segments) -> Iterator[tuple[str, int, range]]:
        """Yields (policy, index of the group, layers) for neighbouring equal layers with the same policy."""
        start, group = 0, 0
        for policy, count in segments:
            stop = start + count
            while start < stop:
                end = self.blocks[group][1].stop
                until = min(stop, end)
                yield policy, group, range(start, until)
                start = until
                group += start == end

    def memory(self, segments: Segments) -> AllLayersMemory:
        """Returns the memory of all layers with these policies."""
        spans = [(self.of(group, policy), indices) for policy, group, indices in self.spans(segments)]
        # The last offloaded activations are still on the device and are used from there.
        resident = next((layer.host for layer, _ in reversed(spans) if layer.host), 0)
        # Below the first offloaded layer, no copy to or from the host is in flight.
        first = next((indices[0] for layer, indices in spans if layer.host), None)
        forward, backward, on_device = [], [], 0
        for layer, indices in spans:
            total = on_device + layer.on_device * (len(indices) - 1) + layer.forward
            forward.append((indices[-1], total - (layer.host if indices[-1] == first else 0)))
            on_device += layer.on_device * len(indices)
        below, gradients = on_device + resident, 0
        for layer, indices in reversed(spans):
            # A layer's peak already includes its reloaded activations and those being prefetched.
            start = below - (resident if layer.host else 0)
            ends = {0, len(indices) - 1} | ({max(len(indices) - 2, 0)} if indices[0] == first else set())
            for offset in sorted(ends):
                total = (
                    start
                    - layer.on_device * (offset + 1)
                    + layer.backward
                    + gradients
                    + layer.gradients * offset
                )
                index = indices[-1 - offset]
                backward.append((index, total - (layer.host if index == first else 0)))
            below -= layer.on_device * len(indices)
            gradients += layer.gradients * len(indices)
        host = sum(layer.host * len(indices) for layer, indices in spans)
        return AllLayersMemory(on_device + resident, host, tuple(forward), tuple(backward))


def segments_of(policies: Sequence[str]) -> Segments:
    """Returns runs of the same policy: ("a", "a", "b") → [("a", 2), ("b", 1)]."""
    return [(policy, len(list(run))) for policy, run in itertools.groupby(policies)]


def stream_dtype(job: Job) -> str:
    """Returns the dtype of the residual stream: the weights' dtype, with or without autocast."""
    return job.weights_dtype


def dequantizes_weights(job: Job) -> bool:
    """Returns whether a step dequantizes weights: not if all layers have dequantized copies."""
    return job.quantization is not None and job.dequantized_layers < job.shape.num_layers


def dequantize_scratch_bytes(job: Job) -> int:
    """Returns the temporary bytes to dequantize a weight, without the workspace."""
    if job.quantization is None or not dequantizes_weights(job):
        return 0
    quantization = job.quantization
    return spec_quantized.scratch_bytes(
        job.shape,
        quantization.kind,
        impl=quantization.impl,
        block=quantization.block_size,
        double=quantization.double,
    )


def workspace_bytes(job: Job) -> int:
    """Returns the bytes of the workspace: one dequantized weight, allocated at the first matmul."""
    return spec_quantized.workspace_bytes(job.shape, job.dtype) if dequantizes_weights(job) else 0


def update_scratch(job: Job) -> int:
    """Returns the peak temporary bytes of the optimizer step, in backward of one parameter's update."""
    return job.trained.update_scratch(
        job.optimizer, device=job.device, impl=job.optimizer_impl, in_backward=job.in_backward
    )
