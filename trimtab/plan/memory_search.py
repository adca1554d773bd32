"""The search for the fastest recompute policies, tiles and loss memory within a memory limit.

An assignment is how many layers, in their order, have each recompute policy; runs of equal layers are counted as one.
Bytes come from `plan.memory`, costs from what each policy recomputes and offloads. The search looks at every
assignment that could be the fastest and fits; there are few thousands, and none needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trimtab.adapt.spec_recompute import HOST, POLICIES, Recomputation, recomputation, saved_under
from trimtab.facts.devices import DeviceFacts
from trimtab.facts.dtypes import BYTES
from trimtab.facts.operations import Kind, total_bytes
from trimtab.kernels.linear_cross_entropy import spec as loss_spec
from trimtab.kernels.linear_cross_entropy.schedule import LEAST_ROWS, ROW_STEP, row_stride, schedule
from trimtab.model.spec_block import DeclaredBlock
from trimtab.plan.job import Job
from trimtab.plan.layers import (
    Layers,
    Segments,
    declared_blocks,
    num_tiles,
    segments_of,
)
from trimtab.plan.memory import (
    BEFORE_LAYERS,
    OUTSIDE,
    Phase,
    gradient_bytes,
    phases_around,
    predict,
    state_bytes,
    weight_bytes,
)

SLACK, GAPS = 0.03, {"cuda": 48 * 2**20, "cpu": 0}
"""What a search leaves free: the share of the memory that comes and goes to which predictions are held, and what a
GPU's allocator loses between its blocks. What stands, weights and optimizer states, is known to the byte."""
SHORTEST_TILE = 512
"""Tokens of the smallest tile: shorter products leave a GPU idle."""
PRODUCT_RATE = 0.75
"""Of a device's ceiling that the matrix products of a layer reach: 690–790 of 989 TFLOP/s, measured on an H200."""
ATTENTION_RATE = 0.6
"""Of the rate of matrix products that tiled attention reaches: 569 of 690–790 TFLOP/s at best, measured on an H200."""
USUAL = {"cuda": (1e14, 1e12), "cpu": (1e11, 2e10)}
"""FLOP/s and bytes/s where nothing is known of a device; only their ratio matters here."""


@dataclass(frozen=True)
class Rates:
    """What a device does in a second."""

    flops: float
    bytes: float
    link: float
    """Bytes to the host and, at the same time, back."""


@dataclass(frozen=True)
class MemorySetting:
    """One answer of the search: a recompute policy per layer, tiles, loss memory, and what they need and cost."""

    policies: tuple[str, ...]
    mlp_tiles: int
    loss_memory: int | None
    """What the loss may hold of its logits."""
    needed: int
    """Bytes on the device at the peak, the process itself included."""
    host: int
    """Pinned bytes of the host."""
    seconds: float
    """A microbatch's time beyond keeping everything, by the device's ceilings: a figure to compare settings by."""
    unpacked_layers: int = 0
    """Layers whose packed weights are kept unpacked as well."""


def rates_of(device: DeviceFacts, dtype: str) -> Rates:
    """A device's ceilings, or usual ones where they are not known."""
    usual = USUAL[device.kind]
    ceiling = device.ceiling(dtype)
    flops = ceiling[0] * PRODUCT_RATE if ceiling else usual[0]
    return Rates(flops, device.bandwidth or usual[1], device.host_link)


def find_setting(
    job: Job, device: DeviceFacts, limit: int, *, tiles: int | None = None, fixed_loss: bool = False
) -> tuple[MemorySetting, bool]:
    """(the fastest setting within the limit, True), or (the one that needs least, False) where none is.

    Args:
        job: what is trained; its own policies are not looked at, its `loss_memory` is the most that is tried.
        device: its rates, and its host's free memory.
        limit: bytes on the device, the process itself included.
        tiles: of the feed-forward, where they are given; any number otherwise.
        fixed_loss: whether the loss holds just what the job says.

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
    within = within_limit(job, limit)
    host, rates = device.pinnable_bytes, rates_of(device, job.dtype)
    best: tuple[float, Job, Segments] | None = None
    least: tuple[int, Job, Segments] | None = None
    for variant in _variants(job, tiles, fixed_loss):
        loss = _loss_cost(variant, rates)
        search = _Search(variant, rates, within, host)
        smallest = search.smallest()
        if least is None or smallest[0] < least[0]:
            least = (smallest[0], variant, smallest[1])
        if smallest[0] <= within:
            found = search.fastest(math.inf if best is None else best[0] - loss - 1e-12)
            if found is not None:
                best = (found[0] + loss, variant, found[1])
    assert least is not None
    _, variant, segments = best or least
    return setting_of(variant, device, segments), best is not None


def with_policies(
    job: Job,
    device: DeviceFacts,
    limit: int,
    policies: tuple[str, ...],
    *,
    tiles: int | None = None,
    fixed_loss: bool = False,
) -> tuple[MemorySetting, bool]:
    """(the fastest tiles and loss that fit a limit beside layers that are given, whether any do); else the smallest."""
    segments = segments_of(policies)
    settings = [setting_of(variant, device, segments) for variant in _variants(job, tiles, fixed_loss)]
    fitting = [setting for setting in settings if setting.needed <= limit]
    if fitting:
        return min(fitting, key=lambda setting: setting.seconds), True
    return min(settings, key=lambda setting: setting.needed), False


def within_limit(job: Job, limit: int) -> int:
    """What a search fills of a limit: all but some slack."""
    standing = weight_bytes(job) + state_bytes(job) + OUTSIDE[job.device]
    return limit - int(max(limit - standing, 0) * SLACK) - GAPS[job.device]


def least(job: Job, device: DeviceFacts, *, tiles: int | None = None) -> int:
    """The fewest bytes on the device with which a job can be run at all, the process itself included."""
    host, rates = device.pinnable_bytes, rates_of(device, job.dtype)
    thrifty = job.changed(loss_memory=_loss_memories(job)[-1])
    variants = (thrifty.changed(mlp_tiles=count) for count in tile_counts(job, tiles))
    return min(_Search(variant, rates, 0, host).smallest()[0] for variant in variants)


def setting_of(job: Job, device: DeviceFacts, segments: Segments) -> MemorySetting:
    """The setting that these (policy, layers) are, the first layers first."""
    policies = tuple(policy for policy, count in segments for _ in range(count))
    memory = predict(job.changed(policies=policies))
    rates = rates_of(device, job.dtype)
    seconds = segment_seconds(Layers(job), policy_seconds(job, rates), segments) + _loss_cost(job, rates)
    return MemorySetting(
        policies, job.mlp_tiles, job.loss_memory, memory.needed, memory.host, seconds, job.unpacked_layers
    )


def segment_seconds(layers: Layers, costs: Sequence[dict[str, float]], segments: Segments) -> float:
    """Seconds per microbatch that an assignment of policies adds; `costs` are those of `policy_seconds`."""
    return sum(costs[run][policy] * len(piece) for policy, run, piece in layers.pieces(segments))


def recompute_seconds(job: Job, device: DeviceFacts, policies: Sequence[str]) -> float | None:
    """Seconds per microbatch that policies add, by the device's ceilings; None where they are not known."""
    if device.ceiling(job.dtype) is None:
        return None
    costs = policy_seconds(job, rates_of(device, job.dtype))
    return segment_seconds(Layers(job), costs, segments_of(policies))


def _variants(job: Job, tiles: int | None, fixed_loss: bool) -> Iterator[Job]:
    """The job with each number of tiles, and what the loss may hold."""
    for memory in [job.loss_memory] if fixed_loss else _loss_memories(job):
        for count in tile_counts(job, tiles):
            yield job.changed(mlp_tiles=count, loss_memory=memory)


def _loss_memories(job: Job) -> list[int | None]:
    """What a loss that can trade memory for time may be given, most first."""
    if job.loss_impl != "triton" or job.loss_memory is None:
        return [job.loss_memory]
    row = row_stride(job.shape.vocab_size) * BYTES[job.dtype]
    fewer = [rows * row for rows in (8192, 2048, LEAST_ROWS, ROW_STEP) if rows * row < job.loss_memory]
    return [job.loss_memory, *fewer, None]


def _loss_cost(job: Job, rates: Rates) -> float:
    """Seconds that the loss takes: its products, and passes over the head's gradient, one a chunk of rows."""
    shape, N = job.shape, job.batch * job.tokens
    trained = job.trained.head > 0
    dims = (N, shape.hidden_size, shape.vocab_size)
    memory = job.loss_memory
    flops = loss_spec.flops(
        *dims, weight_grad=trained, impl=job.loss_impl, dtype=job.dtype, memory_bytes=memory
    )
    moved = 0
    if job.loss_impl == "triton":
        widths = BYTES[job.dtype], BYTES[job.gradient_dtype]
        rows = schedule(*dims, *widths, memory_bytes=memory, weight_grad=trained).rows
        head = shape.hidden_size * shape.vocab_size
        moved = -(-N // rows) * head * (widths[0] + (2 * widths[1] if trained else 0))
    return flops / rates.flops + moved / rates.bytes


def tile_counts(job: Job, tiles: int | None) -> Iterator[int]:
    """Numbers of tiles to try, fewest first; the one that is given, if one is."""
    if tiles is not None:
        yield tiles
        return
    count = 1
    while count == 1 or job.batch * job.tokens >= count * SHORTEST_TILE:
        yield count
        count *= 2


def policy_seconds(job: Job, rates: Rates) -> list[dict[str, float]]:
    """Seconds that a policy adds per layer and microbatch, by the device's ceilings; for each run of equal layers."""
    return [_seconds_of(job, block, rates) for block, _ in declared_blocks(job)]


def _seconds_of(job: Job, block: DeclaredBlock, rates: Rates) -> dict[str, float]:
    costs = {}
    for policy in POLICIES:
        again = recomputation(block, policy, num_tiles(job))
        flops = again.products + again.attention / ATTENTION_RATE
        costs[policy] = flops / rates.flops + again.moved / rates.bytes
        costs[policy] += (_dequantized(job, block, again) + _added_up(job, block)) / rates.bytes
    if job.device == "cuda":
        forward = _forward(block, rates)
        # Out while the layer computes, back while the one above goes backward, which takes three times as long.
        for policy in HOST:
            copy = total_bytes(saved_under(block, policy)) / rates.link
            costs[policy] += max(copy - forward, 0) + max(copy - 3 * forward, 0)
    for policy in HOST:
        costs[policy] *= 1.001  # where it costs nothing, a layer stays on the device all the same
    return costs


def _forward(block: DeclaredBlock, rates: Rates) -> float:
    """Seconds of a layer's forward pass, by the device's ceilings."""
    flops = moved = 0.0
    for one in block.operations:
        if one.kind is Kind.PRODUCT:
            flops += one.forward.flops
        elif one.kind is Kind.ATTENTION:
            flops += one.forward.flops / ATTENTION_RATE
        else:
            moved += one.forward.moved
    return flops / rates.flops + moved / rates.bytes


def _dequantized(job: Job, block: DeclaredBlock, again: Recomputation) -> float:
    """Bytes that are moved to dequantize weights once more than a plain forward and backward pass does."""
    if job.quantization is None:
        return 0.0
    # Each tile dequantizes for its forward and its backward pass; the recomputed tiles are counted in `again`.
    tiles = 2 * (num_tiles(job) - 1) * _feed_forward_weights(block)
    return (again.weights + tiles) * (BYTES[job.dtype] + 0.5)


def _added_up(job: Job, block: DeclaredBlock) -> float:
    """Bytes that are moved to add up the gradients of a trained feed-forward over its tiles: a sum in fp32."""
    if job.mlp_tiles == 1 or job.lora is not None:
        return 0.0
    moved = BYTES[job.gradient_dtype] + 2 * BYTES["fp32"]
    return float(num_tiles(job) * _feed_forward_weights(block) * moved)


def _feed_forward_weights(block: DeclaredBlock) -> int:
    return sum(one.weights for one in block.feed_forward)


class _Search:
    """One number of tiles: which counts of policies fit, and which of those is fastest."""

    def __init__(self, job: Job, rates: Rates, limit: int, host: int | None) -> None:
        self.costs = policy_seconds(job, rates)
        self.layers: Layers = Layers(job)
        around = phases_around(job, gradient_bytes(job), self.layers)
        self.forward, self.backward = around[Phase.LAYERS_FORWARD], around[Phase.LAYERS_BACKWARD]
        self.before_layers = max(around[phase] for phase in BEFORE_LAYERS)
        self.after_layers = max(around[Phase.EMBEDDING_BACKWARD], around[Phase.OPTIMIZER_STEP])
        self.standing = weight_bytes(job) + state_bytes(job) + OUTSIDE[job.device]
        self.limit = limit
        self.num_layers = job.shape.num_layers
        # One way to the host for all layers that take it.
        ways = ("offload",) if job.compiled else HOST
        runs = range(len(self.layers.blocks))
        per_layer = {policy: max(self.layers.of(run, policy).host for run in runs) for policy in ways}
        self.most_sent = {policy: self._most(per_layer[policy], host) for policy in ways}

    def _most(self, per_layer: int, host: int | None) -> int:
        """Layers that the host has room for; none on a CPU, where what would be sent is there already."""
        if per_layer == 0:
            return 0
        return self.num_layers if host is None else min(self.num_layers, host // per_layer)

    def needed(self, segments: Segments) -> int:
        """Bytes on the device at the peak."""
        held = self.layers.held(segments)
        return self.standing + max(
            self.forward + max(total for _, total in held.forward),
            self.before_layers + held.kept,
            self.backward + max(total for _, total in held.backward),
            self.after_layers,
        )

    def cost(self, segments: Segments) -> float:
        return segment_seconds(self.layers, self.costs, segments)

    def smallest(self) -> tuple[int, Segments]:
        """The least that any assignment needs."""
        options = []
        for policy, most in self.most_sent.items():
            for sent in {0, most}:
                segments = _segments(policy, sent, self.num_layers - sent, 0, 0, 0)
                options.append((self.needed(segments), segments))
        return min(options)

    def fastest(self, to_beat: float) -> tuple[float, Segments] | None:
        """(cost, assignment) of the cheapest that fits; None if none does, or none that costs less than `to_beat`."""
        best: tuple[float, Segments] | None = None
        L = self.num_layers
        for policy, most in self.most_sent.items():
            for sent, whole in ((s, w) for s in range(most + 1) for w in range(L - s + 1)):
                rest = L - sent - whole
                if self.cost(_segments(policy, sent, whole, 0, 0, rest)) >= to_beat:
                    continue
                # No way to run the other layers that is cheaper than `selective` holds less than it does.
                if self.needed(_segments(policy, sent, whole, rest, 0, 0)) > self.limit:
                    continue
                found = self._fill(policy, sent, whole, rest, to_beat)
                if found is not None:
                    best, to_beat = found, found[0]
        return best

    def _fill(
        self, policy: str, sent: int, whole: int, rest: int, to_beat: float
    ) -> tuple[float, Segments] | None:
        """The cheapest way to give the other layers `none`, `pointwise` or `selective`, if it costs less."""

        def ways(selective: int, pointwise: int) -> Segments:
            return _segments(policy, sent, whole, selective, pointwise, rest - selective - pointwise)

        best: tuple[float, Segments] | None = None
        most = rest
        for selective in range(rest + 1):
            if self.cost(ways(selective, 0)) >= to_beat:
                break
            # With one more `selective`, no more `pointwise` are needed than before: the number only falls.
            most = min(most, rest - selective)
            # The last layer is computed again while everything is held: there `none` may hold less (with dropout).
            fitting = (
                n for n in (most, most - 1) if n >= 0 and self.needed(ways(selective, n)) <= self.limit
            )
            found = next(fitting, None)
            if found is None:
                continue
            most = found
            while most and self.needed(ways(selective, most - 1)) <= self.limit:
                most -= 1
            cost = self.cost(ways(selective, most))
            if cost < to_beat:
                best, to_beat = (cost, ways(selective, most)), cost
        return best


def _segments(policy: str, sent: int, whole: int, selective: int, pointwise: int, plain: int) -> Segments:
    """The order that holds least (`spec_recompute.canonical`), as runs."""
    counts = {
        policy: sent,
        "block": whole,
        "selective": selective,
        "pointwise": pointwise,
        "none": plain,
    }
    return tuple((policy, count) for policy, count in counts.items() if count)
