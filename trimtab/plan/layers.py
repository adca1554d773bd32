"""What the blocks of a job hold between their passes, and in each one's backward pass. Imports no torch.

Everything is summed over the operations that the blocks declare (`trimtab.model.spec_block`); what is saved of them
under a recompute policy is `trimtab.adapt.spec_recompute`'s.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trimtab.adapt import spec_quantized
from trimtab.adapt.spec_linears import AdaptedProjections
from trimtab.adapt.spec_recompute import (
    HOST,
    IN_HALVES,
    last_recomputed,
    saved_under,
    tile_rows,
)
from trimtab.facts.dtypes import BYTES, nbytes
from trimtab.facts.operations import Activation, saved_activations, total_bytes
from trimtab.model.spec_block import BETWEEN, BLOCK_INPUT, DeclaredBlock, declare_block
from trimtab.model.spec_operations import Execution
from trimtab.plan.backward import (
    ParameterGradients,
    branch_gradient,
    gradient_bytes,
    walk_backward,
    walk_forward,
)
from trimtab.plan.job import Job

Segments = Sequence[tuple[str, int]]
"""(policy, how many layers have it), the first layers first."""


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of one layer under a policy."""

    kept: int
    """On the device, from the forward pass to the layer's backward."""
    peak: int
    """The most during the layer's backward pass: what was kept, what comes back, and gradients."""
    forward: int
    """The most during the layer's forward pass, its input included."""
    gradients: int
    """Of its trained tensors, where they pile up during backward."""
    host: int = 0
    """Pinned memory of the host."""


def declared_blocks(job: Job) -> list[tuple[DeclaredBlock, range]]:
    """(operations, the layers that have them) for each run of equal layers."""
    return [(declare_layer(job, run[0]), run) for run in layer_runs(job)]


def layer_runs(job: Job) -> Iterator[range]:
    """Runs of layers that are equal in their blocks and backends, in what is trained and in whether their input has a
    gradient."""
    requires_grad = list(inputs_require_grad(job))
    start = 0
    kinds = zip(job.shape.blocks, job.attention_backends, job.trained.layers, requires_grad, strict=True)
    for _, run in itertools.groupby(kinds):
        stop = start + len(list(run))
        yield range(start, stop)
        start = stop


def inputs_require_grad(job: Job) -> Iterator[bool]:
    """Whether each layer's input has a gradient: below it something is trained, or graphs are compiled so."""
    below = job.compiled or job.trained.trains_embedding
    for trained in job.trained.layers:
        yield below
        below = below or bool(trained)


def num_tiles(job: Job) -> int:
    """How many tiles the feed-forward halves run in."""
    tokens = job.batch * job.tokens
    return -(-tokens // tile_rows(tokens, job.mlp_tiles))


def declare_layer(job: Job, layer: int) -> DeclaredBlock:
    """The operations of one layer of a job."""
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
            {one.name: one.gradient for one in job.trained.layers[layer]},
        ),
        adapted,
        input_requires_grad=next(itertools.islice(inputs_require_grad(job), layer, None)),
        tile_tokens=tile_rows(tokens, job.mlp_tiles) if job.mlp_tiles > 1 else None,
    )


def layer_memory(job: Job, block: DeclaredBlock, policy: str) -> LayerMemory:
    """Bytes of one layer of a job under a policy.

    On a CPU `offload` keeps the input where it is, as `block` does, and the other two that offload do so as well.
    """
    kept = saved_under(block, policy)
    size = total_bytes(kept)
    left = gradient_bytes(block.operations) if _parameter_gradients(job).pile_up else 0
    offloaded = policy in HOST and job.device != "cpu"
    peak, forward = _backward_peak(job, block, policy, kept), _forward_peak(block, kept)
    if offloaded:
        # Meanwhile what the layer below offloaded is on its way to the host, or back.
        return LayerMemory(0, peak + size, forward + size, left, size)
    return LayerMemory(size, peak, forward, left)


def _forward_peak(block: DeclaredBlock, kept: list[Activation]) -> int:
    """The most bytes during a layer's forward pass."""
    operations = block.attention if block.tile else block.operations
    x, wanted = operations[0].inputs[0], {one.name for one in kept}
    held = [total for total, _ in walk_forward(operations, block.requires_grad, [x], wanted)]
    if not block.tile:
        return max(held)
    between, output = block.tile[0].inputs[0], block.feed_forward[-1].outputs[0]
    tile = [total for total, _ in walk_forward(block.tile, frozenset(), [between], set())]
    return max(max(held), total_bytes(kept) + 2 * output.nbytes + max(tile))


def _backward_peak(job: Job, block: DeclaredBlock, policy: str, kept: list[Activation]) -> int:
    """The most bytes during a layer's backward pass, the gradient of its output included."""
    if not block.differentiates:
        return 0
    if block.tile:
        return _tiled_peak(job, block, policy, kept)
    operations, requires_grad = block.operations, block.requires_grad
    output = operations[-1].outputs[0]
    held = {one.name: one for one in kept}
    peaks = [total_bytes(kept)]
    if policy != "none":
        again = operations[: last_recomputed(block, policy) + 1]
        wanted = {BLOCK_INPUT, *(one.name for one in saved_activations(operations, requires_grad))}
        for total, live in walk_forward(again, requires_grad, kept, wanted):
            peaks.append(total)
            held = live
    peaks = [peak + output.nbytes + branch_gradient(operations[-1]) for peak in peaks]
    overwrites = policy != "none" and not job.compiled
    walk = walk_backward(
        operations, requires_grad, held, output, _parameter_gradients(job), recomputed=overwrites
    )
    return max(peaks + [total for _, total in walk])


def _parameter_gradients(job: Job) -> ParameterGradients:
    return ParameterGradients(
        job.accumulation == 1 and not job.in_backward, update_scratch(job) if job.in_backward else 0
    )


def _tiled_peak(job: Job, block: DeclaredBlock, policy: str, kept: list[Activation]) -> int:
    """The same for a layer whose feed-forward runs in tiles: the tiles first, then the attention half."""
    requires_grad = block.requires_grad
    saved = {one.name: one for one in saved_activations(block.attention, requires_grad)}
    between = block.attention[-1].outputs[0]
    wanted = {BLOCK_INPUT, *saved}
    held, peaks = {one.name: one for one in kept}, [0]
    recompute = policy != "none"
    again = block.attention[: last_recomputed(block, policy) + 1]
    if recompute and policy not in IN_HALVES:  # all of the first half comes back before the tiles run
        for total, live in walk_forward(again, requires_grad, kept, wanted | {BETWEEN}):
            peaks.append(total + between.nbytes)
            held = live
    given = between.nbytes + branch_gradient(block.attention[-1])
    standing = total_bytes(list(held.values())) + 2 * between.nbytes  # the gradients of output and input
    peaks.append(standing + _tile_peak(block))
    if recompute and policy in IN_HALVES:
        for total, live in walk_forward(again, requires_grad, kept, wanted):
            peaks.append(total + given)
            held = live
    held = {name: one for name, one in held.items() if name in saved or name == BLOCK_INPUT}
    walk = walk_backward(block.attention, requires_grad, held, between, _parameter_gradients(job))
    left = gradient_bytes(block.feed_forward) if _parameter_gradients(job).pile_up else 0
    return max(peaks + [total + left for _, total in walk])


def _tile_peak(block: DeclaredBlock) -> int:
    """What the tiles hold besides the whole input's gradient: sums of weights' gradients in fp32, and one tile.

    A tile reads its part of the stream where it lies, and its weights' gradients stay until all are made.
    """
    requires_grad = block.requires_grad
    saved = {one.name: one for one in saved_activations(block.tile, requires_grad) if one.name != BETWEEN}
    output = block.tile[-1].outputs[0]
    sums = sum(4 * math.prod(gradient.dims) for one in block.tile for gradient in one.gradients)
    walk = walk_backward(block.tile, requires_grad, saved, output, ParameterGradients())
    return sums + max([total for _, total in walk], default=0)


@dataclass(frozen=True)
class Held:
    """What all layers of a job hold under their policies."""

    kept: int
    """On the device, from forward to backward."""
    host: int
    """Pinned bytes of the host."""
    forward: tuple[tuple[int, int], ...]
    """(layer, bytes held in its forward pass) where that may be the most: at the end of alike layers."""
    backward: tuple[tuple[int, int], ...]
    """(layer, bytes held in its backward pass) where that may be the most: at both ends of alike layers."""


class Layers:
    """What the blocks of a job hold, whichever policies they have: worked out when it is asked for, and once."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.blocks = declared_blocks(job)
        """(operations, layers) of each run of equal layers."""
        self.stream = job.batch * job.tokens * job.shape.hidden_size * BYTES[stream_dtype(job)]
        """The residual stream, and the gradient of it."""
        self._reading = unpacking_bytes(job)
        self._found: dict[tuple[int, str], LayerMemory] = {}

    def of(self, run: int, policy: str) -> LayerMemory:
        """Bytes of a layer of one run of equal layers under a policy; reading packed weights included."""
        found = self._found.get((run, policy))
        if found is None:
            found = layer_memory(self.job, self.blocks[run][0], policy)
            if found.peak:
                found = dataclasses.replace(found, peak=found.peak + self._reading)
            self._found[run, policy] = found
        return found

    def gradients(self) -> int:
        """Bytes that the backward pass of all layers leaves, where gradients pile up."""
        if not _parameter_gradients(self.job).pile_up:
            return 0
        return sum(gradient_bytes(block.operations) * len(run) for block, run in self.blocks)

    def pieces(self, segments: Segments) -> Iterator[tuple[str, int, range]]:
        """(policy, index of the run, layers) of neighbours with the same policy, from the first layer to the last."""
        start, run = 0, 0
        for policy, count in segments:
            stop = start + count
            while start < stop:
                end = self.blocks[run][1].stop
                until = min(stop, end)
                yield policy, run, range(start, until)
                start = until
                run += start == end

    def held(self, segments: Segments) -> Held:
        """What layers with these policies hold."""
        pieces = [(self.of(run, policy), layers) for policy, run, layers in self.pieces(segments)]
        # What was offloaded last is still on the device, and used from there.
        resident = next((one.host for one, _ in reversed(pieces) if one.host), 0)
        forward, backward, kept = [], [], 0
        for one, layers in pieces:
            forward.append((layers[-1], kept + one.kept * (len(layers) - 1) + one.forward))
            kept += one.kept * len(layers)
        below, gradients = kept + resident, 0
        for one, layers in reversed(pieces):
            # Of inputs from the host, the one in use and the one on its way are counted with what comes back.
            under = below - (resident if one.host else 0)
            for step in {0, len(layers) - 1}:
                total = under - one.kept * (step + 1) + one.peak + gradients + one.gradients * step
                backward.append((layers[-1 - step], total))
            below -= one.kept * len(layers)
            gradients += one.gradients * len(layers)
        host = sum(one.host * len(layers) for one, layers in pieces)
        return Held(kept + resident, host, tuple(forward), tuple(backward))


def segments_of(policies: Sequence[str]) -> Segments:
    """Runs of the same policy: ("a", "a", "b") → [("a", 2), ("b", 1)]."""
    return [(policy, len(list(run))) for policy, run in itertools.groupby(policies)]


def stream_dtype(job: Job) -> str:
    """Dtype of the residual stream: under autocast that of the weights."""
    return job.weights_dtype if job.weights_dtype != job.dtype else job.dtype


def made_gradient(job: Job, count: int) -> int:
    """A weight's gradient as backward makes it: in the weight's dtype, then cast if kept in another."""
    made = nbytes(job.weights_dtype, count)
    return made if job.weights_dtype == job.gradient_dtype else made + nbytes(job.gradient_dtype, count)


def unpacking_bytes(job: Job) -> int:
    """Temporary bytes of reading packed weights, besides the workspace."""
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


def update_scratch(job: Job) -> int:
    """Most temporary bytes while one parameter is updated."""
    return job.trained.update_scratch(job.optimizer, device=job.device, impl=job.optimizer_impl)
