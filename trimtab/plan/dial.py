"""Memory as a dial: the fastest way to run a job's layers within a limit, found by counting.

Layers are alike, so that an assignment is how many of them have each recompute policy. Bytes come from
`plan.memory`, costs from what each policy computes again and sends to the host. The search looks at every assignment
that could be the fastest and fits; there are few thousands, and none needs torch.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from trimtab.adapt import spec_recompute
from trimtab.adapt.spec_recompute import POLICIES
from trimtab.facts.devices import DeviceFacts
from trimtab.model import spec as model_spec
from trimtab.plan.memory import Job, Layers, gradient_bytes, layers_of, moments_around, predict

SLACK = 0.03
"""Share of the limit that a search leaves free: predictions are held to 3 %, and an allocator loses some to gaps."""
SHORTEST_TILE = 512
"""Tokens of the smallest tile: shorter products leave a GPU idle."""
HOST_SHARE = 0.8
"""Of the host's free memory that may be pinned."""
ATTENTION_RATE = 0.6
"""Of the rate of matrix products that tiled attention reaches: 569 of 690–790 TFLOP/s at best, measured on an H200."""
USUAL = {"cuda": (1e14, 1e12), "cpu": (1e11, 2e10)}
"""FLOP/s and bytes/s where nothing is known of a device; only their ratio matters here."""

Segments = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Rates:
    """What a device does in a second."""

    flops: float
    bytes: float
    link: float
    """Bytes to the host and, at the same time, back."""


@dataclass(frozen=True)
class Setting:
    """Where the dial stands."""

    policies: tuple[str, ...]
    mlp_tiles: int
    needed: int
    """Bytes on the device at the peak, the process itself included."""
    host: int
    """Pinned bytes of the host."""
    seconds: float
    """A microbatch's time beyond keeping everything, by the device's ceilings: a figure to compare settings by."""


def rates_of(device: DeviceFacts, dtype: str) -> Rates:
    """A device's ceilings, or usual ones where they are not known."""
    usual = USUAL[device.kind]
    ceiling = device.ceiling(dtype)
    return Rates(ceiling[0] if ceiling else usual[0], device.bandwidth or usual[1], device.host_link)


def choose(job: Job, device: DeviceFacts, limit: int, *, tiles: int | None = None) -> tuple[Setting, bool]:
    """(the fastest setting within the limit, True), or (the one that needs least, False) where none is.

    Args:
        job: what is trained; its own policies are not looked at.
        device: its rates, and its host's free memory.
        limit: bytes on the device, the process itself included.
        tiles: of the feed-forward, where they are given; any number otherwise.

    Example:
        >>> from trimtab.facts.shapes import ModelShape
        >>> shape = ModelShape("llama", 32_000, 512, 1376, 8, num_heads=8, num_kv_heads=8, head_dim=64)
        >>> job = Job(shape, batch=4, tokens=2048, accumulation=1, dtype="bf16", weights_dtype="bf16",
        ...           gradient_dtype="bf16", optimizer="adamw_8bit", attention="varlen", device="cuda")
        >>> gpu = DeviceFacts("NVIDIA H200", "cuda", 150 * 10**9, capability=(9, 0), bf16=True)
        >>> for gigabytes in (8, 2):
        ...     setting, fits = choose(job, gpu, gigabytes * 10**9)
        ...     print(fits, spec_recompute.counted(setting.policies))
        True {'none': 8}
        True {'selective': 1, 'pointwise': 6, 'none': 1}
    """
    within = int(limit * (1 - SLACK))
    host = None if device.host_free_bytes is None else int(device.host_free_bytes * HOST_SHARE)
    rates = rates_of(device, job.dtype)
    best: tuple[float, int, Segments] | None = None
    least: tuple[int, int, Segments] | None = None
    for count in tile_counts(job, tiles):
        tiled = dataclasses.replace(job, mlp_tiles=count)
        search = _Search(tiled, rates, within, host)
        found = search.fastest(None if best is None else best[0])
        if found is not None:
            best = (found[0], count, found[1])
        smallest = search.smallest()
        if least is None or smallest[0] < least[0]:
            least = (smallest[0], count, smallest[1])
    assert least is not None
    _, count, segments = best or least
    return setting_of(dataclasses.replace(job, mlp_tiles=count), device, segments), best is not None


def setting_of(job: Job, device: DeviceFacts, segments: Segments) -> Setting:
    """The setting that these (policy, layers) are, the first layers first."""
    policies = tuple(policy for policy, count in segments for _ in range(count))
    memory = predict(dataclasses.replace(job, policies=policies))
    costs = _costs(job, rates_of(device, job.dtype))
    seconds = sum(costs[policy] * count for policy, count in segments)
    return Setting(policies, job.mlp_tiles, memory.needed, memory.host, seconds)


def tile_counts(job: Job, tiles: int | None) -> Iterator[int]:
    """Numbers of tiles to try, fewest first; the one that is given, if one is."""
    if tiles is not None:
        yield tiles
        return
    count = 1
    while count == 1 or job.batch * job.tokens >= count * SHORTEST_TILE:
        yield count
        count *= 2


def _costs(job: Job, rates: Rates) -> dict[str, float]:
    """Seconds a layer and microbatch that each policy adds, by the device's ceilings."""
    N, tokens = job.batch * job.tokens, job.tokens
    costs = {}
    for policy in POLICIES:
        # Layers with a window cost less; the first is taken for all, so that they stay alike.
        again = spec_recompute.again(job.shape, policy, tokens, dtype=job.dtype, mlp_tiles=job.mlp_tiles)
        flops = again.products + again.attention / ATTENTION_RATE
        costs[policy] = N * (flops / rates.flops + again.moved / rates.bytes)
    if job.device == "cuda":
        copy = N * job.shape.hidden_size * 2 / rates.link
        forward = N * model_spec.product_flops(job.shape) / rates.flops
        # Out while the layer computes, back while the one above goes backward, which takes three times as long.
        costs["offload"] += max(copy - forward, 0) + max(copy - 3 * forward, 0)
    costs["offload"] *= 1.001  # where it costs nothing, a layer stays on the device all the same
    return costs


class _Search:
    """One number of tiles: which counts of policies fit, and which of those is fastest."""

    def __init__(self, job: Job, rates: Rates, limit: int, host: int | None) -> None:
        self.costs = _costs(job, rates)
        gradients = gradient_bytes(job)
        self.layers: Layers = layers_of(job, gradients)
        self.around = dict(moments_around(job, gradients, self.layers))
        empty = predict(dataclasses.replace(job, policies=("block",) * job.shape.num_layers))
        self.standing = empty.before.total + empty.outside
        self.limit = limit
        self.num_layers = job.shape.num_layers
        per_layer = self.layers.of["offload"].host
        self.most_offloaded = self.num_layers
        if per_layer == 0:
            self.most_offloaded = 0  # on a CPU it is what `block` is
        elif host is not None:
            self.most_offloaded = min(self.num_layers, host // per_layer)

    def needed(self, segments: Segments) -> int:
        """Bytes on the device at the peak."""
        kept = self.layers.kept(segments)
        losses = max(self.around["the loss, at the end of forward"], self.around["the loss, in backward"])
        layers = max(held for _, held in self.layers.backward(segments))
        return self.standing + max(
            losses + kept,
            self.around["backward through the layers"] + layers,
            self.around["the embedding, at the end of backward"],
            self.around["the optimizer step"],
        )

    def cost(self, segments: Segments) -> float:
        return sum(self.costs[policy] * count for policy, count in segments)

    def smallest(self) -> tuple[int, Segments]:
        """The least that any assignment needs."""
        options = []
        for offloaded in {0, self.most_offloaded}:
            segments = _segments(offloaded, self.num_layers - offloaded, 0, 0, 0)
            options.append((self.needed(segments), segments))
        return min(options)

    def fastest(self, to_beat: float | None) -> tuple[float, Segments] | None:
        """(cost, assignment) of the cheapest that fits; None if none does, or none that costs less than `to_beat`."""
        best: tuple[float, Segments] | None = None
        L = self.num_layers
        for offloaded in range(self.most_offloaded + 1):
            for whole in range(L - offloaded + 1):
                bound = best[0] if best is not None else to_beat
                thrifty = self.costs["offload"] * offloaded + self.costs["block"] * whole
                # In any order of the others, they cost no less than nothing and hold no less than selective ones.
                if bound is not None and thrifty >= bound - 1e-15:
                    break
                rest = L - offloaded - whole
                if self.needed(_segments(offloaded, whole, rest, 0, 0)) > self.limit:
                    continue
                found = self._fill(offloaded, whole, rest)
                if bound is None or found[0] < bound - 1e-15:
                    best = found
        return best

    def _fill(self, offloaded: int, whole: int, rest: int) -> tuple[float, Segments]:
        """The cheapest way to give the other layers `none`, `pointwise` or `selective`; all selective fits."""
        best: tuple[float, Segments] | None = None
        for selective in range(rest + 1):
            others = rest - selective
            if best is not None and self.cost(_segments(offloaded, whole, selective, 0, others)) >= best[0]:
                break

            def of(pointwise: int, selective: int = selective, others: int = others) -> Segments:
                return _segments(offloaded, whole, selective, pointwise, others - pointwise)

            if self.needed(of(others)) > self.limit:
                continue
            # Each further one that is computed again holds no more: the first number that fits is the cheapest.
            pointwise = bisect.bisect_left(range(others), -self.limit, key=lambda n: -self.needed(of(n)))
            cost = self.cost(of(pointwise))
            if best is None or cost < best[0]:
                best = (cost, of(pointwise))
        assert best is not None
        return best


def _segments(offloaded: int, whole: int, selective: int, pointwise: int, plain: int) -> Segments:
    """The order that holds least (`spec_recompute.canonical`), as runs."""
    counts = {
        "offload": offloaded,
        "block": whole,
        "selective": selective,
        "pointwise": pointwise,
        "none": plain,
    }
    return tuple((policy, count) for policy, count in counts.items() if count)
