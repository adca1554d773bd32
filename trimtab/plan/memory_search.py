"""The search for the fastest recompute policies, tiles and loss memory within a memory limit.

Bytes come from `plan.memory`, seconds from the time model (`plan.step_time`): recomputation, tiling, repeated
dequantization, and offload copies that computation does not hide. For each number of tiles and each amount of loss
memory `plan.assignments` compares all assignments of policies to layers. Imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trimtab.adapt.spec_recompute import OFFLOADING, POLICIES
from trimtab.facts.calibration import Calibration
from trimtab.facts.devices import DeviceFacts
from trimtab.facts.dtypes import BYTES
from trimtab.kernels.linear_cross_entropy.schedule import MIN_ROWS, ROW_STEP, row_stride
from trimtab.plan.assignments import Assignments, BytesOutsideBlocks
from trimtab.plan.device_rates import rates_of, shipped_calibration
from trimtab.plan.job import Job
from trimtab.plan.layers import Layers, Segments, declared_blocks, layer_groups, segments_of
from trimtab.plan.memory import (
    BETWEEN_LAYER_PASSES,
    PROCESS_BYTES,
    Phase,
    bytes_outside_blocks,
    gradient_bytes,
    predict,
    state_bytes,
    weight_bytes,
)
from trimtab.plan.rates import Rates
from trimtab.plan.step_time import layer_copies, layer_seconds, loss_time

SLACK, FRAGMENTATION = 0.03, {"cuda": 48 * 2**20, "cpu": 0}
"""Memory that a search leaves free: a share of the dynamic memory for prediction errors, and bytes for fragmentation
of a GPU's allocator. Persistent memory (weights and optimizer states) is known to the byte."""
SHORTEST_TILE = 512
"""Tokens of the smallest tile: smaller matmuls underuse a GPU."""
TYPICAL_RATES = {"cuda": (1e14, 1e12), "cpu": (1e11, 2e10)}
"""FLOP/s and bytes/s assumed for unknown devices; only their ratio matters here."""


@dataclass(frozen=True)
class MemorySetting:
    """A result of the search: a recompute policy per layer, tiles, loss memory, and their memory and time."""

    policies: tuple[str, ...]
    mlp_tiles: int
    loss_memory: int | None
    """Bytes that the loss may allocate beyond its inputs and gradients."""
    needed: int
    """Bytes on the device at the peak, including the process itself."""
    host: int
    """Pinned host memory in bytes."""
    seconds: float
    """Seconds per microbatch that policies, tiles and offloading add to saving everything, plus all seconds of the
    loss."""
    dequantized_layers: int = 0
    """Layers whose quantized weights also have dequantized copies."""


def search_rates(device: DeviceFacts, dtype: str) -> Rates:
    """Returns a device's rates from its data sheet, or typical rates without one: enough to compare settings.

    Calibrations are ignored: tiles and loss memory determine the rounding order of sums, and a recipe must produce the
    same losses before and after a machine is calibrated.
    """
    rates = rates_of(dataclasses.replace(device, calibration=None), dtype)
    if rates is not None:
        return rates
    flops, copy = TYPICAL_RATES[device.kind]
    measured = shipped_calibration() if device.kind == "cuda" else Calibration("", {dtype: flops}, copy, 0.0)
    return Rates({dtype: flops}, copy, measured, to_host=device.host_link, from_host=device.host_link)


def find_setting(
    job: Job,
    device: DeviceFacts,
    limit: int,
    *,
    reserved: int = 0,
    tiles: int | None = None,
    fixed_loss: bool = False,
) -> tuple[MemorySetting, bool]:
    """Returns (the fastest setting within the limit, True), or (the lowest-memory setting, False) if none fits.

    Args:
        job: the training job; its policies are ignored, its `loss_memory` is the maximum that is tried.
        device: the device with its rates and free host memory.
        limit: bytes on the device, including the process itself.
        reserved: bytes of the limit for other purposes than a training step, such as writing checkpoints on a CPU.
        tiles: a fixed number of feed-forward tiles; None to try all.
        fixed_loss: whether to use exactly the job's loss memory.

    Example:
        >>> from trimtab.facts.shapes import uniform_shape
        >>> shape = uniform_shape("llama", 32_000, 512, 1376, 8, num_heads=8, num_kv_heads=8, head_dim=64)
        >>> job = Job(shape, batch=4, tokens=2048, accumulation=1, dtype="bf16", weights_dtype="bf16",
        ...           gradient_dtype="bf16", optimizer="adamw_8bit", attention="varlen", device="cuda")
        >>> gpu = DeviceFacts("NVIDIA H200", "cuda", 150 * 10**9, capability=(9, 0), bf16=True)
        >>> for gigabytes in (8, 2):
        ...     setting, fits = find_setting(job, gpu, gigabytes * 10**9)
        ...     print(fits, set(setting.policies) == {"none"})
        True True
        True False
    """
    # Not the sum of both: the search's slack may serve for what is reserved.
    budget, rates = min(usable_bytes(job, limit), limit - reserved), search_rates(device, job.dtype)
    best: tuple[float, Job, Segments] | None = None
    smallest: tuple[int, Job, Segments] | None = None
    loss_seconds_by_memory = {
        memory: loss_time(job.changed(loss_memory=memory), rates).seconds
        for memory in ([job.loss_memory] if fixed_loss else _loss_memories(job))
    }
    for count in tile_counts(job, tiles):
        tiled = job.changed(mlp_tiles=count)
        costs = policy_seconds(tiled, rates)
        least_seconds = sum(
            min(cost.values()) * len(group) for cost, group in zip(costs, layer_groups(job), strict=True)
        )
        if best is not None and least_seconds + min(loss_seconds_by_memory.values()) >= best[0]:
            continue
        assignments = _assignments(tiled, device, costs)
        for memory, loss_seconds in loss_seconds_by_memory.items():
            if best is not None and least_seconds + loss_seconds >= best[0]:
                continue
            variant = tiled.changed(loss_memory=memory)
            outside = _bytes_outside_blocks(variant)
            assignment = assignments.fastest(outside, budget)
            if assignment is not None and (
                best is None or assignment.seconds + loss_seconds < best[0] - 1e-12
            ):
                best = (assignment.seconds + loss_seconds, variant, assignment.segments)
            if best is None:
                candidate = assignments.smallest(outside)
                if smallest is None or candidate.needed < smallest[0]:
                    smallest = (candidate.needed, variant, candidate.segments)
    answer = best or smallest
    assert answer is not None
    return make_setting(answer[1], device, answer[2]), best is not None


def find_setting_with_policies(
    job: Job,
    device: DeviceFacts,
    limit: int,
    policies: tuple[str, ...],
    *,
    tiles: int | None = None,
    fixed_loss: bool = False,
) -> tuple[MemorySetting, bool]:
    """Returns the fastest setting with given policies within a limit and True, or the lowest-memory one and False."""
    segments = segments_of(policies)
    settings = [make_setting(variant, device, segments) for variant in _variants(job, tiles, fixed_loss)]
    fitting = [setting for setting in settings if setting.needed <= limit]
    if fitting:
        return min(fitting, key=lambda setting: setting.seconds), True
    return min(settings, key=lambda setting: setting.needed), False


def usable_bytes(job: Job, limit: int) -> int:
    """Returns the bytes of a limit that a search may use: all but some slack."""
    persistent = weight_bytes(job) + state_bytes(job) + PROCESS_BYTES[job.device]
    return limit - int(max(limit - persistent, 0) * SLACK) - FRAGMENTATION[job.device]


def lowest_memory(job: Job, device: DeviceFacts, *, tiles: int | None = None) -> int:
    """Returns the bytes on the device of a job's lowest-memory setting, including the process itself."""
    no_costs = [dict.fromkeys(POLICIES, 0.0) for _ in layer_groups(job)]  # times do not matter here
    sizes = []
    for count in tile_counts(job, tiles):
        tiled = job.changed(mlp_tiles=count)
        assignments = _assignments(tiled, device, no_costs)
        # Logits of a few rows, or no loss memory: either may need less.
        variants = (tiled.changed(loss_memory=memory) for memory in _loss_memories(job)[-2:])
        sizes += [assignments.smallest(_bytes_outside_blocks(variant)).needed for variant in variants]
    return min(sizes)


def make_setting(job: Job, device: DeviceFacts, segments: Segments) -> MemorySetting:
    """Returns the setting of a job with these segments of policies."""
    policies = tuple(policy for policy, count in segments for _ in range(count))
    memory = predict(job.changed(policies=policies))
    rates = search_rates(device, job.dtype)
    seconds = segment_seconds(Layers(job), policy_seconds(job, rates), segments)
    return MemorySetting(
        policies,
        job.mlp_tiles,
        job.loss_memory,
        memory.needed,
        memory.host,
        seconds + loss_time(job, rates).seconds,
        job.dequantized_layers,
    )


def segment_seconds(layers: Layers, costs: Sequence[dict[str, float]], segments: Segments) -> float:
    """Returns the seconds per microbatch that an assignment adds; `costs` are from `policy_seconds`."""
    return sum(costs[group][policy] * len(piece) for policy, group, piece in layers.spans(segments))


def recompute_seconds(job: Job, device: DeviceFacts, policies: Sequence[str]) -> float | None:
    """Returns the seconds per microbatch that policies add; None if the device's rates are unknown."""
    rates = rates_of(device, job.dtype)
    if rates is None:
        return None
    return segment_seconds(Layers(job), policy_seconds(job, rates), segments_of(policies))


def policy_seconds(job: Job, rates: Rates) -> list[dict[str, float]]:
    """Returns for each group of equal layers the seconds per layer and microbatch that each policy, with the job's
    tiles, adds to saving everything without tiles."""
    untiled_job = job.changed(mlp_tiles=1)
    untiled_blocks = declared_blocks(untiled_job)
    blocks = declared_blocks(job) if job.mlp_tiles > 1 else untiled_blocks
    costs_by_block: dict[int, dict[str, float]] = {}  # groups of the same kind share a block
    for (block, _), (untiled, _) in zip(blocks, untiled_blocks, strict=True):
        if id(block) in costs_by_block:
            continue
        base = layer_seconds(untiled_job, rates, untiled, "none")
        costs = {policy: layer_seconds(job, rates, block, policy) - base for policy in POLICIES}
        if job.mlp_tiles > 1:  # tiles repeat work and never save time
            costs = {
                p: max(cost, layer_seconds(untiled_job, rates, untiled, p) - base)
                for p, cost in costs.items()
            }
        for policy in OFFLOADING if job.device == "cuda" else ():
            costs[policy] += layer_copies(job, rates, block, policy)
        for policy in OFFLOADING:
            costs[policy] += 1e-3 * base  # prefers the device if offloading costs nothing
        costs_by_block[id(block)] = costs
    return [costs_by_block[id(block)] for block, _ in blocks]


def _assignments(job: Job, device: DeviceFacts, costs: Sequence[dict[str, float]]) -> Assignments:
    offload_policies = ("offload",) if job.compiled else OFFLOADING
    return Assignments(Layers(job), costs, offload_policies, device.pinnable_bytes)


def _bytes_outside_blocks(job: Job) -> BytesOutsideBlocks:
    """Bytes outside the blocks in each phase, with weights, optimizer states and the process itself."""
    outside = bytes_outside_blocks(job, gradient_bytes(job), Layers(job))
    persistent = weight_bytes(job) + state_bytes(job) + PROCESS_BYTES[job.device]
    return BytesOutsideBlocks(
        forward=persistent + outside[Phase.LAYERS_FORWARD],
        loss=persistent + max(outside[phase] for phase in BETWEEN_LAYER_PASSES),
        backward=persistent + outside[Phase.LAYERS_BACKWARD],
        after=persistent + max(outside[Phase.EMBEDDING_BACKWARD], outside[Phase.OPTIMIZER_STEP]),
    )


def _variants(job: Job, tiles: int | None, fixed_loss: bool) -> Iterator[Job]:
    """Yields the job with each number of tiles and each amount of loss memory."""
    for memory in [job.loss_memory] if fixed_loss else _loss_memories(job):
        for count in tile_counts(job, tiles):
            yield job.changed(mlp_tiles=count, loss_memory=memory)


def _loss_memories(job: Job) -> list[int | None]:
    """Amounts of loss memory to try, in descending order; one for losses that cannot trade memory for time."""
    if job.loss_impl != "triton" or job.loss_memory is None:
        return [job.loss_memory]
    row = row_stride(job.shape.vocab_size) * BYTES[job.dtype]
    fewer = [rows * row for rows in (8192, 2048, MIN_ROWS, ROW_STEP) if rows * row < job.loss_memory]
    return [job.loss_memory, *fewer, None]


def tile_counts(job: Job, tiles: int | None) -> Iterator[int]:
    """Yields the numbers of tiles to try in ascending order, or only `tiles` if it is not None."""
    if tiles is not None:
        yield tiles
        return
    count = 1
    while count == 1 or job.batch * job.tokens >= count * SHORTEST_TILE:
        yield count
        count *= 2
