"""All assignments of recompute policies to layers, and the fastest one within a memory limit. No torch.

Layers with the lowest-memory policies come first (`trimtab.adapt.spec_recompute.canonical`), so that an
assignment is a few boundaries: layers before the first boundary have the first policy, and so on. Memory and
time of a segment are prefix sums over its layers, computed once. All boundaries on a grid are then compared at
once, and the best ones are refined.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trimtab.adapt.spec_recompute import OFFLOADING
from trimtab.plan.layers import Layers, Segments

GRID = 32
"""Boundaries are first looked for on at most so many places."""
REFINED = 3
"""Assignments of the grid around which single layers are tried."""
ON_DEVICE = ("block", "selective", "pointwise", "none")
"""The policies whose saved activations stay on the device, the lowest-memory ones first."""


@dataclass(frozen=True)
class Around:
    """Bytes besides the blocks', in the phases of a step; weights and optimizer states are in each."""

    forward: int
    loss: int
    """From the end of the forward pass to the last block's backward pass."""
    backward: int
    after: int
    """Embedding and optimizer step."""


@dataclass(frozen=True)
class Assignment:
    """Policies of all layers, with what they need and cost."""

    segments: Segments
    needed: int
    seconds: float


class _Policy:
    """Sums over the first layers, and the most over ranges of layers, if all have one policy."""

    # L layers; arrays of L + 1 hold sums over the layers before

    def __init__(self, layers: Layers, policy: str, seconds: Sequence[float]) -> None:
        self.name = policy
        found = [
            (layers.of(run, policy), layer) for run, (_, span) in enumerate(layers.blocks) for layer in span
        ]
        per_layer = {
            name: np.array([getattr(one, name) for one, _ in found], dtype=np.int64)
            for name in ("kept", "peak", "forward", "gradients", "host")
        }
        offloaded = np.flatnonzero(per_layer["host"])
        if len(offloaded):  # below the first layer that offloads, nothing is on its way to the host or back
            first = offloaded[0]
            per_layer["forward"][first] -= per_layer["host"][first]
            per_layer["peak"][first] -= per_layer["host"][first]
        self.kept = _sums(per_layer["kept"])
        self.host = _sums(per_layer["host"])
        self.seconds = _sums(np.array([seconds[i] for i in self._runs(layers)], dtype=np.float64))
        gradients = _sums(per_layer["gradients"])
        above = gradients[-1] - gradients[1:]
        self.host_layer = int(per_layer["host"].max(initial=0))
        self.most_forward = _range_maxima(self.kept[:-1] + per_layer["forward"])
        self.most_backward = _range_maxima(self.kept[:-1] + per_layer["peak"] + above)
        self.last_host = per_layer["host"]

    @staticmethod
    def _runs(layers: Layers) -> Iterator[int]:
        for run, (_, span) in enumerate(layers.blocks):
            yield from (run for _ in span)


def _sums(values: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, values.dtype), np.cumsum(values)])


def _range_maxima(values: np.ndarray) -> np.ndarray:
    """[first, end) → the largest of values[first:end]; a very small number where the range is empty."""
    L = len(values)
    table = np.full((L + 1, L + 1), np.iinfo(np.int64).min // 4, dtype=np.int64)
    for first in range(L):
        table[first, first + 1 :] = np.maximum.accumulate(values[first:])
    return table


class Assignments:
    """All assignments of policies to the layers of a job.

    Example:
        >>> from trimtab.facts.shapes import uniform_shape
        >>> from trimtab.plan.job import Job
        >>> shape = uniform_shape("llama", 32_000, 512, 1376, 8, num_heads=8, num_kv_heads=8, head_dim=64)
        >>> job = Job(shape, batch=4, tokens=2048, accumulation=1, dtype="bf16", weights_dtype="bf16",
        ...           gradient_dtype="bf16", optimizer="adamw_8bit", attention="varlen", device="cuda")
        >>> costs = {"none": 0.0, "pointwise": 1.0, "selective": 4.0, "block": 5.0, "offload": 6.0}
        >>> found = Assignments(Layers(job), [costs], ("offload",), None)
        >>> found.fastest(Around(0, 0, 0, 0), 2**60).segments
        (('none', 8),)
    """

    def __init__(
        self,
        layers: Layers,
        seconds: Sequence[dict[str, float]],
        ways: Sequence[str],
        host: int | None,
    ) -> None:
        """Args:
        layers: memory of each layer under each policy.
        seconds: of each policy, for each run of equal layers.
        ways: policies that offload to the host, of which an assignment has one at most.
        host: bytes that may be pinned; None if unknown.
        """
        self.num_layers = layers.job.shape.num_layers
        self.host = host
        self.ways = [
            way for way in ways if any(layers.of(run, way).host for run in range(len(layers.blocks)))
        ]
        self.policies = {
            name: _Policy(layers, name, [cost[name] for cost in seconds]) for name in (*self.ways, *ON_DEVICE)
        }

    def fastest(self, around: Around, limit: int) -> Assignment | None:
        """The cheapest assignment within a limit, or None if none is."""
        best: Assignment | None = None
        for names in self._orders():
            found = self._fastest_of(names, around, limit)
            if found is not None and (best is None or found.seconds < best.seconds):
                best = found
        return best

    def smallest(self, around: Around) -> Assignment:
        """The assignment that needs least; of those the cheapest.

        As many layers as fit in host memory are offloaded; the others save only their input. The last layer is
        recomputed while the saved activations of all others are live: it may need less memory if it saves more.
        """
        options = []
        for names in self._orders():
            bounds = self._extremes(names)
            needed, seconds = self._measure(names, bounds, around)
            best = np.lexsort((seconds, needed))[0]
            options.append(self._assignment(names, bounds[best], int(needed[best]), float(seconds[best])))
        return min(options, key=lambda one: (one.needed, one.seconds))

    def _extremes(self, names: Sequence[str]) -> np.ndarray:
        """Boundaries of the assignments that may need least."""
        L, others = self.num_layers, len(ON_DEVICE)
        most = 0
        if names[0] in OFFLOADING:
            room = np.iinfo(np.int64).max if self.host is None else self.host
            most = int(np.searchsorted(self.policies[names[0]].host, room, side="right")) - 1
        rows = []
        for offloaded in {0, max(most - 1, 0), most}:
            for last in range(others):  # the policy of the last layer
                for rest in (L, max(L - 1, offloaded)):
                    inner = [rest] * last + [L] * (others - 1 - last)
                    rows.append([0, *([offloaded] if names[0] in OFFLOADING else []), *inner, L])
        return np.array(rows, np.int64)

    def _orders(self) -> list[tuple[str, ...]]:
        """The policies that one assignment may have, in their order."""
        return [(way, *ON_DEVICE) for way in self.ways] or [ON_DEVICE]

    def _fastest_of(self, names: Sequence[str], around: Around, limit: int) -> Assignment | None:
        bounds = self._grid(len(names))
        chosen, needed, seconds = self._within(names, bounds, around, limit)
        if not len(chosen):
            return None
        if self._step > 1:
            first = np.argsort(seconds, kind="stable")[:REFINED]
            around_best = np.concatenate([self._neighbours(chosen[i]) for i in first])
            finer = self._within(names, np.unique(around_best, axis=0), around, limit)
            if len(finer[0]) and finer[2].min() < seconds.min():
                chosen, needed, seconds = finer
        # Of equally fast ones the one that needs least.
        best = np.lexsort((needed, seconds))[0]
        return self._assignment(names, chosen[best], int(needed[best]), float(seconds[best]))

    def _within(
        self, names: Sequence[str], bounds: np.ndarray, around: Around, limit: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        needed, seconds = self._measure(names, bounds, around)
        fits = needed <= limit
        return bounds[fits], needed[fits], seconds[fits]

    def _measure(
        self, names: Sequence[str], bounds: np.ndarray, around: Around
    ) -> tuple[np.ndarray, np.ndarray]:
        """(bytes needed, seconds) of each row of boundaries; impossible ones need more than any limit."""
        count = len(bounds)
        kept = np.zeros(count, np.int64)
        forward = np.full(count, np.iinfo(np.int64).min // 4)
        backward = forward.copy()
        host = np.zeros(count, np.int64)
        seconds = np.zeros(count, np.float64)
        resident = self._resident(names, bounds)
        for column, name in enumerate(names):
            policy, start, stop = self.policies[name], bounds[:, column], bounds[:, column + 1]
            offset = kept - policy.kept[start]
            forward = np.maximum(forward, policy.most_forward[start, stop] + offset)
            own = 0 if name in OFFLOADING else resident
            backward = np.maximum(backward, policy.most_backward[start, stop] + offset + own)
            kept = kept + policy.kept[stop] - policy.kept[start]
            host = host + policy.host[stop] - policy.host[start]
            seconds = seconds + policy.seconds[stop] - policy.seconds[start]
        needed = np.maximum.reduce(
            [
                around.forward + forward,
                around.loss + kept + resident,
                around.backward + backward,
                np.full(count, around.after),
            ]
        )
        if self.host is not None:
            needed[host > self.host] = np.iinfo(np.int64).max
        return needed, seconds

    def _resident(self, names: Sequence[str], bounds: np.ndarray) -> np.ndarray:
        """Bytes of the activations offloaded last: they are still on the device, and backward reads them there."""
        if names[0] not in OFFLOADING:
            return np.zeros(len(bounds), np.int64)
        policy, end = self.policies[names[0]], bounds[:, 1]
        last = np.concatenate([np.zeros(1, np.int64), policy.last_host])
        resident: np.ndarray = last[end]
        return resident

    @property
    def _step(self) -> int:
        return -(-self.num_layers // GRID)

    def _grid(self, count: int) -> np.ndarray:
        """Rows of boundaries 0 ≤ b₁ ≤ … ≤ L of `count` policies, on every `_step`-th layer."""
        if count not in self._grids:
            places = np.unique([*range(0, self.num_layers, self._step), self.num_layers])
            self._grids[count] = _boundaries(places, count)
        return self._grids[count]

    @cached_property
    def _grids(self) -> dict[int, np.ndarray]:
        return {}

    def _neighbours(self, bounds: np.ndarray) -> np.ndarray:
        """Boundaries that differ by less than a step of the grid."""
        inner = bounds[1:-1]
        near = np.arange(1 - self._step, self._step)
        shifts = np.stack(np.meshgrid(*[near] * len(inner), indexing="ij"), -1).reshape(-1, len(inner))
        moved = np.sort(np.clip(inner + shifts, 0, self.num_layers), axis=1)
        ends = np.zeros((len(moved), 1), moved.dtype)
        rows: np.ndarray = np.concatenate([ends, moved, ends + self.num_layers], axis=1)
        return rows

    def _assignment(
        self, names: Sequence[str], bounds: np.ndarray, needed: int, seconds: float
    ) -> Assignment:
        spans = zip(names, bounds[:-1], bounds[1:], strict=True)
        segments = tuple((name, int(stop - start)) for name, start, stop in spans if stop > start)
        return Assignment(segments, needed, seconds)


def _boundaries(places: np.ndarray, count: int) -> np.ndarray:
    """Rows of count + 1 boundaries: 0, then places that never fall, then the last one."""
    rows = np.zeros((1, 1), np.int64)
    for _ in range(count - 1):
        last = rows[:, -1]
        rows = np.concatenate(
            [
                np.column_stack([rows[last <= place], np.full((last <= place).sum(), place)])
                for place in places
            ]
        )
    return np.column_stack([rows, np.full(len(rows), places[-1])])
