"""Time of an optimizer step, operation by operation: the declared kernels at the rates of a device. No torch.

A step takes the sum of its kernels' times on the device. Copies to and from the host overlap with computation and
count only as far as they take longer. The host needs time to launch kernels: a step takes at least as long as all
launches that are not part of a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trimtab.adapt.spec_linears import UNBIASED
from trimtab.adapt.spec_recompute import OFFLOADING, recomputed_operations, saved_under
from trimtab.adapt.targets import EMBEDDING
from trimtab.facts.calibration import Calibration
from trimtab.facts.devices import DeviceFacts
from trimtab.facts.dtypes import BYTES
from trimtab.facts.operations import Gradient, Kernel, Operation, OperationKind, PassCost, total_bytes
from trimtab.kernels.adamw8bit.spec import CHUNK
from trimtab.kernels.attention import spec as attention_spec
from trimtab.kernels.linear_cross_entropy import spec as loss_spec
from trimtab.kernels.linear_cross_entropy.schedule import schedule
from trimtab.model import spec as model_spec
from trimtab.model.spec_block import ATTENTION_RESIDUAL, FEED_FORWARD_RESIDUAL, DeclaredBlock
from trimtab.model.spec_operations import Execution
from trimtab.optim import spec as optim_spec
from trimtab.plan.device_rates import rates_of
from trimtab.plan.job import Job
from trimtab.plan.layers import declared_blocks, num_tiles
from trimtab.plan.rates import Rates

FORWARD, BACKWARD, RECOMPUTE, UPDATE = "forward", "backward", "recompute", "update"
"""Phases of a step."""
CAST = "cast"
"""Implementation of a `COPY` that writes a gradient in another dtype."""
BIAS = "bias gradient"
"""Implementation of an `ADD` that sums a bias's gradient over all tokens."""
FROZEN = " frozen"
"""Suffix of a norm's implementation if its weight has no gradient."""
IN_BACKWARD = "optim_in_backward"
"""Key of the host time per parameter of an optimizer that runs in the backward pass."""


@dataclass(frozen=True)
class OperationTime:
    """Time of one declared operation in one phase of an optimizer step."""

    name: str
    kind: OperationKind
    phase: str
    count: int
    """Executions per step: layers × tiles × microbatches."""
    seconds: float
    """Per execution."""
    launches: int = 0
    """Kernel launches per execution."""

    @property
    def total(self) -> float:
        """Seconds of all executions."""
        return self.count * self.seconds


@dataclass(frozen=True)
class StepTime:
    """Time of one optimizer step: all microbatches and the update."""

    seconds: float
    low_seconds: float
    high_seconds: float
    """The range in which the step is expected; wider for unmeasured devices."""
    floor_seconds: float
    """Time with all kernels at the device's peak rates: no step can be faster."""
    operations: tuple[OperationTime, ...]
    exposed_copies: float
    """Seconds of copies to and from the host that computation does not hide."""
    host_seconds: float
    """Host time of all launches outside CUDA graphs."""
    basis: str
    """A description of the source of the rates."""

    def by_kind(self) -> dict[str, float]:
        """Seconds of each kind of operation, the longest first."""
        totals: dict[str, float] = {}
        for operation in self.operations:
            totals[operation.kind.value] = totals.get(operation.kind.value, 0.0) + operation.total
        return dict(sorted(totals.items(), key=lambda item: -item[1]))

    def by_phase(self) -> dict[str, float]:
        """Seconds of each phase."""
        totals: dict[str, float] = {}
        for operation in self.operations:
            totals[operation.phase] = totals.get(operation.phase, 0.0) + operation.total
        return totals

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "seconds": self.seconds,
            "low_seconds": self.low_seconds,
            "high_seconds": self.high_seconds,
            "floor_seconds": self.floor_seconds,
            "by_phase": self.by_phase(),
            "by_kind": self.by_kind(),
            "exposed_copies": self.exposed_copies,
            "host_seconds": self.host_seconds,
            "basis": self.basis,
        }


def step_time(job: Job, device: DeviceFacts, *, graphs: bool = False) -> StepTime | None:
    """Predict the time of one optimizer step.

    Args:
        job: the training job; `attended_share` is the share of attention within packed documents.
        device: a device with a calibration or a known data sheet.
        graphs: whether forward and backward are captured as CUDA graphs.

    Returns:
        None if the device's rates are unknown.

    Example:
        >>> from trimtab.facts.calibration import Calibration
        >>> from trimtab.facts.shapes import uniform_shape
        >>> tiny = uniform_shape("llama", 512, 64, 128, 2, num_heads=4, num_kv_heads=2, head_dim=16)
        >>> job = Job(tiny, batch=1, tokens=128, accumulation=1, dtype="fp32", weights_dtype="fp32",
        ...           gradient_dtype="fp32", optimizer="adamw_torch_fused", attention="sdpa_flash", device="cpu")
        >>> cpu = DeviceFacts("a CPU", "cpu", 2**33, calibration=Calibration("a CPU", {"fp32": 1e11}, 2e10, 5e-6))
        >>> step = step_time(job, cpu)
        >>> step.floor_seconds <= step.seconds
        True
        >>> step_time(job, DeviceFacts("a CPU", "cpu", 2**33)) is None
        True
    """
    rates = rates_of(device, job.dtype)
    return None if rates is None else step_time_at(job, rates, graphs=graphs)


def step_time_at(job: Job, rates: Rates, *, graphs: bool = False) -> StepTime:
    """Predict the time of one optimizer step at known rates."""
    passes, update = list(microbatch_times(job, rates)), list(update_times(job, rates))
    operations = [*passes, *update]
    floor = sum(
        operation.total
        for operation in [*microbatch_times(job, rates, floor=True), *update_times(job, rates, floor=True)]
    )
    copies = job.accumulation * exposed_copies(job, rates)
    in_passes = sum(operation.total for operation in passes) + copies
    in_update = sum(operation.total for operation in update)
    launches = sum(operation.count * operation.launches for operation in passes)
    host = _update_host_seconds(job, rates)
    if graphs:
        # The host launches the update while the device is still busy with the graph.
        seconds = max(in_passes + launches * rates.gap + in_update, host)
    else:
        host += launches * rates.host_seconds(_method(job), compiled=job.compiled)
        seconds = max(in_passes + in_update, host)
    low, high = rates.spread
    return StepTime(
        seconds,
        max(seconds * low, floor),
        seconds * high,
        floor,
        tuple(operations),
        copies,
        host,
        rates.basis,
    )


def _method(job: Job) -> str:
    """The training method, as a key of `Calibration.host_seconds`."""
    if job.quantization is not None:
        return job.quantization.kind
    return "full" if job.lora is None else "lora"


def _update_host_seconds(job: Job, rates: Rates) -> float:
    """Host time of optimizers that update each parameter on its own."""
    seconds = 0.0
    if job.optimizer_impl != "triton" and any(one.dtype != "fp32" for one in job.trained.parameters):
        seconds += updated_chunks(job) * rates.host_seconds(job.optimizer)
    if job.in_backward:
        seconds += len(job.trained.parameters) * rates.host_seconds(IN_BACKWARD)
    return seconds


def updated_chunks(job: Job) -> int:
    """Returns the number of chunks of parameters that an optimizer updates one after another.

    Example:
        >>> from trimtab.facts.shapes import uniform_shape
        >>> tiny = uniform_shape("llama", 512, 64, 128, 2, num_heads=4, num_kv_heads=2, head_dim=16)
        >>> updated_chunks(Job(tiny, batch=1, tokens=128, accumulation=1, dtype="fp32", weights_dtype="fp32",
        ...                    gradient_dtype="fp32", optimizer="adamw_torch", attention="sdpa_flash", device="cpu"))
        21
    """
    size = CHUNK[job.device]
    return sum(-(-parameter.count // size) for parameter in job.trained.parameters)


def declared_launches(job: Job) -> int:
    """Returns the declared kernel launches of forward and backward passes, recomputation included.

    Example:
        >>> from trimtab.facts.shapes import uniform_shape
        >>> tiny = uniform_shape("llama", 512, 64, 128, 2, num_heads=4, num_kv_heads=2, head_dim=16)
        >>> declared_launches(Job(tiny, batch=1, tokens=128, accumulation=1, dtype="fp32", weights_dtype="fp32",
        ...                       gradient_dtype="fp32", optimizer="adamw_8bit", attention="sdpa_flash", device="cpu"))
        114
    """
    unknown = Rates({job.dtype: 1.0}, 1.0, Calibration("", {job.dtype: 1.0}, 1.0, 0.0))
    return sum(operation.count * operation.launches for operation in microbatch_times(job, unknown))


def forward_seconds(job: Job, rates: Rates, tokens: int) -> float:
    """Returns the seconds to evaluate `tokens` tokens: forward passes and the loss, without gradients."""
    if not tokens:
        return 0.0
    timer = _Timer(job, rates, False)
    microbatch = loss_time(job, rates, training=False).seconds
    for block, layers in declared_blocks(job):
        operations = (*block.attention, *block.feed_forward)
        layer_time = sum(
            timer.pass_seconds(operation, _fused_work(operation, job.pointwise == "triton", backward=False))
            for operation in operations
        )
        microbatch += len(layers) * layer_time
    return microbatch * tokens / (job.batch * job.tokens)


class _Timer:
    """Computes the seconds of passes at some rates; with `floor` at the device's peak rates."""

    def __init__(self, job: Job, rates: Rates, floor: bool) -> None:
        self.job, self.rates, self.floor = job, rates, floor

    def kernel_seconds(self, kernel: Kernel, dtype: str, impl: str, backward: bool) -> float:
        if self.floor:
            return self.rates.floor(kernel, dtype)
        return self.rates.seconds(kernel, dtype, impl=impl, backward=backward)

    def pass_seconds(
        self, operation: Operation, work: PassCost, *, backward: bool = False, dequantized: bool = False
    ) -> float:
        """Seconds of one pass of an operation; without dequantization if weights have dequantized copies."""
        kernels = work.kernels or (Kernel(operation.kind, work.flops, work.moved),)
        total = 0.0
        for kernel in kernels:
            if kernel.kind is OperationKind.DEQUANTIZE:
                assert self.job.quantization is not None
                if not dequantized:
                    total += self.kernel_seconds(
                        kernel, self.job.quantization.kind, self.job.quantization.impl, backward
                    )
            else:
                impl = self._impl(kernel)
                if backward and kernel.kind is OperationKind.NORM and not operation.gradients:
                    impl += FROZEN
                total += self.kernel_seconds(kernel, operation.dtype, impl, backward)
        # Launches beyond the listed kernels are casts and sums of small tensors.
        if not self.floor and work.kernels:
            total += max(work.launches - len(work.kernels), 0) * self.rates.tiny
        return total

    def _impl(self, kernel: Kernel) -> str:
        if kernel.kind is OperationKind.ATTENTION:
            masked = self.job.packed and kernel.impl not in attention_spec.SKIPS_DOCUMENTS
            return f"{kernel.impl} packed" if masked else kernel.impl
        pointwise = kernel.kind in (OperationKind.NORM, OperationKind.ROPE, OperationKind.GATE)
        return self.job.pointwise if pointwise else ""


def microbatch_times(job: Job, rates: Rates, *, floor: bool = False) -> Iterator[OperationTime]:
    """Times of all microbatches of a step."""
    timer = _Timer(job, rates, floor)
    yield from _outside_block_times(job, timer)
    for block, layers in declared_blocks(job):
        for policy in dict.fromkeys(job.layer_policies[i] for i in layers):
            indices = [i for i in layers if job.layer_policies[i] == policy]
            num_dequantized = sum(1 for i in indices if i < job.dequantized_layers)
            for times, is_dequantized in ((num_dequantized, True), (len(indices) - num_dequantized, False)):
                if times:
                    for time in _layer_times(job, timer, block, policy, dequantized=is_dequantized):
                        yield _scale_count(time, times * job.accumulation)


def _scale_count(operation: OperationTime, times: int) -> OperationTime:
    return OperationTime(
        operation.name,
        operation.kind,
        operation.phase,
        operation.count * times,
        operation.seconds,
        operation.launches,
    )


def layer_seconds(
    job: Job, rates: Rates, block: DeclaredBlock, policy: str, *, dequantized: bool = False
) -> float:
    """Returns the seconds of one layer in one microbatch under a recompute policy, without offload copies."""
    timer = _Timer(job, rates, False)
    times = _layer_times(job, timer, block, policy, dequantized=dequantized)
    return sum(operation.total for operation in times)


def _layer_times(
    job: Job, timer: _Timer, block: DeclaredBlock, policy: str, *, dequantized: bool
) -> Iterator[OperationTime]:
    """Times of one layer in one microbatch."""
    fused = job.pointwise == "triton"
    tiles = num_tiles(job) if block.tile else 1

    def timed(
        operation: Operation, phase: str, count: int, work: PassCost, backward: bool = False
    ) -> OperationTime:
        seconds = timer.pass_seconds(operation, work, backward=backward, dequantized=dequantized)
        return OperationTime(operation.name, operation.kind, phase, count, seconds, work.launches)

    halves = [(block.attention, 1), (block.tile or block.feed_forward, tiles)]
    for operations, count in halves:
        for operation in operations:
            yield timed(operation, FORWARD, count, _fused_work(operation, fused, backward=False))
            yield from _bias_times(operation, count, timer)
    if not block.differentiates:
        return
    for operation in recomputed_operations(block, policy):
        yield timed(
            operation, RECOMPUTE, 1, operation.recompute or _fused_work(operation, fused, backward=False)
        )
    for operation in block.tile:
        if operation.name != FEED_FORWARD_RESIDUAL:
            yield timed(
                operation,
                RECOMPUTE,
                tiles,
                operation.recompute or _fused_work(operation, fused, backward=False),
            )
    for operations, count in halves:
        for operation in operations:
            work = _backward_work(operation, block, fused)
            if work is not None:
                yield timed(operation, BACKWARD, count, work, backward=True)
    yield from _parameter_gradient_times(block, timer)
    yield from _accumulation_times(block, timer, fused)
    yield from _tile_sum_times(job, timer, block, tiles)


def _fused_work(operation: Operation, fused: bool, *, backward: bool) -> PassCost:
    """A pass as executed: with fused kernels, the addition between the halves is part of the following norm."""
    work = operation.backward if backward else operation.forward
    if not fused or operation.name != ATTENTION_RESIDUAL or backward:
        return work
    written = operation.outputs[0].nbytes
    return PassCost(work.flops, work.moved - written, 0)


def _backward_work(operation: Operation, block: DeclaredBlock, fused: bool) -> PassCost | None:
    """The backward pass for an operation's inputs and parameters, as far as they require gradients."""
    wants_input = any(activation.name in block.requires_grad for activation in operation.inputs)
    if operation.kind is OperationKind.ADD:
        return None
    passes = []
    if wants_input:
        passes.append(_fused_work(operation, fused, backward=True))
    if operation.gradients and operation.parameter_backward.launches:
        passes.append(operation.parameter_backward)
    if not passes:
        return operation.backward if operation.gradients else None
    kernels = tuple(
        kernel
        for work in passes
        for kernel in work.kernels or (Kernel(operation.kind, work.flops, work.moved),)
    )
    return PassCost.of(*kernels, launches=sum(work.launches for work in passes))


def _bias_times(operation: Operation, count: int, timer: _Timer) -> Iterator[OperationTime]:
    """Times to add biases to outputs of products that do not include them: quantized ones, those with adapters."""
    for result in operation.results:
        if result.activation.name.endswith(UNBIASED):
            moved = 2.0 * result.activation.nbytes
            seconds = timer.kernel_seconds(Kernel(OperationKind.ADD, 0.0, moved), operation.dtype, "", False)
            name = f"{result.activation.name.removesuffix(UNBIASED)}.bias_sum"
            yield OperationTime(name, OperationKind.ADD, FORWARD, count, seconds, 1)


def _parameter_gradient_times(block: DeclaredBlock, timer: _Timer) -> Iterator[OperationTime]:
    """Times to sum the gradients of biases over all tokens, and to cast gradients to the dtype that stores them."""
    for operation in block.operations:
        for gradient in operation.gradients:
            if gradient.name.endswith(".bias"):
                read = float(max(activation.nbytes for activation in operation.outputs))
                work = Kernel(OperationKind.ADD, 0.0, read)
                seconds = timer.kernel_seconds(work, timer.job.dtype, BIAS, True)
                yield OperationTime(gradient.name, OperationKind.ADD, BACKWARD, 1, seconds, 1)
            if gradient.stored_bytes != gradient.computed_bytes:
                yield _cast_time(f"{gradient.name}.grad_cast", gradient, timer)


def _cast_time(name: str, gradient: Gradient, timer: _Timer) -> OperationTime:
    """Time to cast a gradient to the dtype in which it is accumulated."""
    moved = float(gradient.computed_bytes + gradient.stored_bytes)
    seconds = timer.kernel_seconds(Kernel(OperationKind.COPY, 0.0, moved), timer.job.dtype, CAST, True)
    return OperationTime(name, OperationKind.COPY, BACKWARD, 1, seconds, 1)


def _accumulation_times(block: DeclaredBlock, timer: _Timer, fused: bool) -> Iterator[OperationTime]:
    """Times to accumulate gradients of activations with several readers: one addition for each but the first."""
    readers: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for operation in block.operations:
        for activation in operation.inputs:
            if activation.name in block.requires_grad:
                readers[activation.name] = readers.get(activation.name, 0) + 1
                sizes[activation.name] = activation.nbytes
    for name, count in readers.items():
        if count > 1 and not (fused and name == ATTENTION_RESIDUAL):
            kernel = Kernel(OperationKind.ADD, 0.0, 3.0 * sizes[name])
            seconds = timer.kernel_seconds(kernel, timer.job.dtype, "", True)
            yield OperationTime(f"{name}.grad", OperationKind.ADD, BACKWARD, count - 1, seconds, 1)


def _tile_sum_times(job: Job, timer: _Timer, block: DeclaredBlock, tiles: int) -> Iterator[OperationTime]:
    """Time to accumulate the weight gradients of a tiled feed-forward over its tiles, in fp32."""
    trained = sum(_elements(gradient.dims) for operation in block.tile for gradient in operation.gradients)
    if trained:
        moved = trained * (BYTES[job.gradient_dtype] + 2 * BYTES["fp32"])
        seconds = timer.kernel_seconds(Kernel(OperationKind.ADD, 0.0, float(moved)), "fp32", "", True)
        yield OperationTime("mlp.tile_gradients", OperationKind.ADD, BACKWARD, tiles, seconds, 3)


def _elements(dims: tuple[int, ...]) -> int:
    count = 1
    for dim in dims:
        count *= dim
    return count


def _outside_block_times(job: Job, timer: _Timer) -> Iterator[OperationTime]:
    """Times of embedding, final norm, head and loss of all microbatches."""
    shape, N, times = job.shape, job.batch * job.tokens, job.accumulation
    run = Execution(
        job.batch, job.tokens, job.dtype, job.attention, job.weights_dtype, job.device, job.pointwise
    )
    stream = N * shape.hidden_size * BYTES[run.stream_dtype]

    def simple(name: str, kind: OperationKind, phase: str, moved: float, launches: int = 1) -> OperationTime:
        seconds = timer.kernel_seconds(Kernel(kind, 0.0, moved), job.dtype, "", phase == BACKWARD)
        return OperationTime(name, kind, phase, times, seconds, launches)

    yield simple("embed_tokens", OperationKind.EMBEDDING, FORWARD, 2.0 * stream)
    if job.trained.trains_embedding:
        table = shape.vocab_size * shape.hidden_size * BYTES[job.weights_dtype]
        yield simple("embed_tokens", OperationKind.EMBEDDING, BACKWARD, 2.0 * stream + 2.0 * table, 12)
    norm = model_spec.final_norm(shape, run)
    for phase, work in ((FORWARD, norm.forward), (BACKWARD, norm.backward)):
        seconds = timer.pass_seconds(norm, work, backward=phase == BACKWARD)
        yield OperationTime(norm.name, norm.kind, phase, times, seconds, 1)
    yield loss_time(job, timer.rates, times, floor=timer.floor)
    for time in _head_gradient_times(job, timer):
        yield _scale_count(time, times)


def _head_gradient_times(job: Job, timer: _Timer) -> Iterator[OperationTime]:
    """Times of the gradients of embedding and head outside their own passes: the head's is scaled by the weights of the
    tokens, the embedding's is cast, and the two are added if the matrices are tied."""
    trained = job.trained
    embedding = trained.module_gradient(EMBEDDING)
    if embedding is not None and embedding.stored_bytes != embedding.computed_bytes:
        yield _cast_time("embed_tokens.grad_cast", embedding, timer)
    head = trained.head_gradient_bytes
    if head:
        scale = Kernel(OperationKind.ADD, 0.0, 2.0 * head)
        seconds = timer.kernel_seconds(scale, job.gradient_dtype, "", True)
        yield OperationTime("lm_head.grad_scale", OperationKind.ADD, BACKWARD, 1, seconds, 1)
        if trained.tied:
            total = Kernel(OperationKind.ADD, 0.0, 3.0 * head)
            seconds = timer.kernel_seconds(total, job.gradient_dtype, "", True)
            yield OperationTime("lm_head.grad_sum", OperationKind.ADD, BACKWARD, 1, seconds, 1)


def loss_time(
    job: Job, rates: Rates, times: int = 1, *, floor: bool = False, training: bool = True
) -> OperationTime:
    """Returns the time of head and cross-entropy, with their gradients if `training`."""
    shape, N = job.shape, job.batch * job.tokens
    dims = (N, shape.hidden_size, shape.vocab_size)
    trained = job.trained.head_gradient_bytes > 0 or job.trained.adapts_head
    flops = 2.0 * N * shape.hidden_size * shape.vocab_size
    if training:
        flops = loss_spec.flops(
            *dims, weight_grad=trained, impl=job.loss_impl, dtype=job.dtype, memory_bytes=job.loss_memory
        )
    moved = float(loss_spec.bytes_moved(*dims, job.dtype))
    kernel = Kernel(OperationKind.LOSS, flops, moved, (N, shape.vocab_size, shape.hidden_size))
    if floor:
        return OperationTime("loss", OperationKind.LOSS, FORWARD, times, rates.floor(kernel, job.dtype))
    impl = job.loss_impl if trained else f"{job.loss_impl} frozen head"
    seconds, chunks = rates.seconds(kernel, job.dtype, impl=impl), 1
    if training and job.loss_impl == "triton":
        widths = BYTES[job.dtype], BYTES[job.gradient_dtype]
        rows = schedule(*dims, *widths, memory_bytes=job.loss_memory, weight_grad=trained).rows
        chunks = -(-N // rows)
        # Each chunk of rows after the first reads the head again, and reads and writes its gradient.
        head = shape.hidden_size * shape.vocab_size * (widths[0] + (2 * widths[1] if trained else 0))
        seconds += (chunks - 1) * head / rates.copy
    return OperationTime("loss", OperationKind.LOSS, FORWARD, times, seconds, 8 * chunks)


def update_times(job: Job, rates: Rates, *, floor: bool = False) -> Iterator[OperationTime]:
    """Yields the times of gradient accumulation, gradient clipping and the optimizer."""
    gradients = float(job.trained.gradient_bytes)

    def moving(
        name: str,
        kind: OperationKind,
        phase: str,
        moved: float,
        count: int,
        impl: str = "",
        dtype: str = "fp32",
    ) -> OperationTime:
        kernel = Kernel(kind, 0.0, moved)
        seconds = rates.floor(kernel, dtype) if floor else rates.seconds(kernel, dtype, impl=impl)
        return OperationTime(name, kind, phase, count, seconds, 2)

    if job.accumulation > 1:
        yield moving("gradients", OperationKind.ADD, BACKWARD, 2.5 * gradients, job.accumulation - 1)
    if not job.in_backward:
        dtype = job.trained.parameters[0].gradient_dtype
        yield moving("gradient norm", OperationKind.NORM, UPDATE, gradients, 1, dtype=dtype)
    cast = sum(p.count for p in job.trained.parameters if p.dtype != p.gradient_dtype)
    if job.optimizer == "adamw_torch_fused" and cast:
        moved = float(cast * (BYTES[job.gradient_dtype] + BYTES[job.weights_dtype]))
        yield moving("optimizer.grad_cast", OperationKind.ADD, UPDATE, moved, 1)
    impl = optimizer_sample(job.optimizer, job.optimizer_impl)
    moved_by_dtype: dict[
        str, float
    ] = {}  # bf16 weights are rounded stochastically, which takes longer on a CPU
    for parameter in job.trained.parameters:
        # The 8-bit kernel takes as long with bf16 gradients as with fp32 ones: arithmetic limits it.
        gradient_dtype = "fp32" if impl == "triton" else parameter.gradient_dtype
        moved = optim_spec.bytes_moved(job.optimizer, parameter.dims, parameter.dtype, gradient_dtype)
        moved_by_dtype[parameter.dtype] = moved_by_dtype.get(parameter.dtype, 0.0) + moved
    for dtype, size in moved_by_dtype.items():
        yield moving("optimizer", OperationKind.OPTIMIZER, UPDATE, size, 1, impl, dtype)


def optimizer_sample(optimizer: str, impl: str) -> str:
    """Returns how samples name an optimizer and its implementation.

    Example:
        >>> optimizer_sample("adamw_8bit", "triton"), optimizer_sample("adamw_torch", "triton")
        ('triton', 'adamw_torch triton')
    """
    if optimizer == "adamw_8bit":
        return impl
    return f"{optimizer} triton" if impl == "triton" else optimizer


def exposed_copies(job: Job, rates: Rates) -> float:
    """Returns the seconds per microbatch of offload copies that computation does not hide."""
    if job.device == "cpu" or not set(job.layer_policies) & set(OFFLOADING):
        return 0.0
    total = 0.0
    for block, layers in declared_blocks(job):
        for policy in set(OFFLOADING) & {job.layer_policies[i] for i in layers}:
            count = sum(1 for i in layers if job.layer_policies[i] == policy)
            total += count * layer_copies(job, rates, block, policy)
    return total


def layer_copies(job: Job, rates: Rates, block: DeclaredBlock, policy: str) -> float:
    """Returns one layer's exposed copy seconds: offload overlaps its forward, prefetch the backward above it."""
    size = total_bytes(saved_under(block, policy))
    timer = _Timer(job, rates, False)
    compute = {FORWARD: 0.0, RECOMPUTE: 0.0, BACKWARD: 0.0}
    for operation in _layer_times(job, timer, block, policy, dequantized=False):
        compute[operation.phase] += operation.total
    offload_seconds, reload_seconds = size / rates.to_host, size / rates.from_host
    return max(offload_seconds - compute[FORWARD], 0.0) + max(
        reload_seconds - compute[RECOMPUTE] - compute[BACKWARD], 0.0
    )
