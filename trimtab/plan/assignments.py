"""All assignments of recompute policies to layers, and the fastest assignment within a memory limit. No torch.

Layers with the lowest-memory policies come first (`trimtab.adapt.spec_recompute.sort_policies`), so that an
assignment is a few boundaries: layers before the first boundary have the first policy, and so on. Memory and
time of a segment come from prefix sums over the layers, computed once. All boundaries on a grid are then compared in
one vectorized pass, and the best are refined.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from trimtab.adapt.spec_recompute import OFFLOADING
from trimtab.plan.layers import Layers, Segments

GRID = 32
"""The largest number of boundary positions of the coarse grid."""
REFINED = 3
"""Number of grid assignments whose boundaries are refined layer by layer."""
LOWEST = np.iinfo(np.int64).min // 4
"""Bytes of an empty range of layers: less than any other, and sums with it do not overflow."""
ON_DEVICE = ("block", "selective", "pointwise", "none")
"""The policies whose saved activations stay on the device, the lowest-memory ones first."""


@dataclass(frozen=True)
class BytesOutsideBlocks:
    """Bytes outside the blocks in the phases of a step, each with weights, optimizer states and the process itself."""

    forward: int
    loss: int
    """From the end of the forward pass to the last block's backward pass."""
    backward: int
    after: int
    """Embedding and optimizer step."""


@dataclass(frozen=True)
class Assignment:
    """Policies of all layers, with their memory in bytes and time in seconds."""

    segments: Segments
    needed: int
    seconds: float


@dataclass(frozen=True)
class _Candidates:
    """Rows of boundaries, with their bytes inside the blocks and their seconds."""

    bounds: np.ndarray
    forward: np.ndarray
    between: np.ndarray
    """Saved activations from the end of the forward pass to the last block's backward pass."""
    backward: np.ndarray
    seconds: np.ndarray

    def needed(self, outside: BytesOutsideBlocks) -> np.ndarray:
        """Bytes of each row together with those outside the blocks."""
        inside = np.maximum(self.forward + outside.forward, self.between + outside.loss)
        np.maximum(inside, self.backward + outside.backward, out=inside)
        needed: np.ndarray = np.maximum(inside, outside.after, out=inside)
        return needed


class _Policy:
    """Prefix sums over layers, and maxima over ranges of layers, if all layers have this policy."""

    # L layers; arrays of length L + 1 are sums over the preceding layers

    def __init__(self, layers: Layers, policy: str, seconds: Sequence[float]) -> None:
        self.name = policy
        layer_memories = [
            (layers.of(group, policy), layer)
            for group, (_, span) in enumerate(layers.blocks)
            for layer in span
        ]
        per_layer = {
            name: np.array([getattr(memory, name) for memory, _ in layer_memories], dtype=np.int64)
            for name in ("on_device", "forward", "backward", "gradients", "host")
        }
        offloaded = np.flatnonzero(per_layer["host"])
        if len(offloaded):  # below the first offloading layer, no copy to or from the host is in flight
            first = offloaded[0]
            per_layer["forward"][first] -= per_layer["host"][first]
            per_layer["backward"][first] -= per_layer["host"][first]
        self.on_device = _prefix_sums(per_layer["on_device"])
        self.host = _prefix_sums(per_layer["host"])
        self.seconds = _prefix_sums(np.array([seconds[i] for i in self._groups(layers)], dtype=np.float64))
        gradients = _prefix_sums(per_layer["gradients"])
        above = gradients[-1] - gradients[1:]
        self.peak_forward = _range_maxima(self.on_device[:-1] + per_layer["forward"])
        self.peak_backward = _range_maxima(self.on_device[:-1] + per_layer["backward"] + above)
        self.host_per_layer = per_layer["host"]

    @staticmethod
    def _groups(layers: Layers) -> Iterator[int]:
        for group, (_, span) in enumerate(layers.blocks):
            yield from (group for _ in span)


def _prefix_sums(values: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, values.dtype), np.cumsum(values)])


def _range_maxima(values: np.ndarray) -> np.ndarray:
    """Returns a table [first, end] of the maximum of values[first:end]; a very small number for an empty range."""
    L = len(values)
    table = np.full((L + 1, L + 1), LOWEST, dtype=np.int64)
    # Row `first` begins with values[first]: the entries before it are the lowest number.
    rows = np.where(np.triu(np.ones((L, L), bool)), values, LOWEST)
    table[:L, 1:] = np.maximum.accumulate(rows, axis=1)
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
        >>> assignments = Assignments(Layers(job), [costs], ("offload",), None)
        >>> assignments.fastest(BytesOutsideBlocks(0, 0, 0, 0), 2**60).segments
        (('none', 8),)
    """

    def __init__(
        self,
        layers: Layers,
        seconds: Sequence[dict[str, float]],
        offload_policies: Sequence[str],
        host: int | None,
    ) -> None:
        """Args:
        layers: memory of each layer under each policy.
        seconds: time of each policy, for each group of equal layers.
        offload_policies: offloading policies; an assignment uses at most one of them.
        host: host bytes that may be pinned; None if unknown.
        """
        self.num_layers = layers.job.shape.num_layers
        self.host = host
        self.offload_policies = [
            policy
            for policy in offload_policies
            if any(layers.of(group, policy).host for group in range(len(layers.blocks)))
        ]
        self.policies = {
            name: _Policy(layers, name, [cost[name] for cost in seconds])
            for name in (*self.offload_policies, *ON_DEVICE)
        }

    def fastest(self, outside: BytesOutsideBlocks, limit: int) -> Assignment | None:
        """Returns the fastest assignment within a limit, or None if there is none."""
        best: Assignment | None = None
        for names in self._policy_orders():
            assignment = self._fastest_of(names, outside, limit)
            if assignment is not None and (best is None or assignment.seconds < best.seconds):
                best = assignment
        return best

    def smallest(self, outside: BytesOutsideBlocks) -> Assignment:
        """Returns the assignment with the lowest memory, the fastest of equals.

        As many layers as fit in host memory are offloaded; the others save only their input. The last layer is
        recomputed while the saved activations of all others are live: it may need less memory if it saves more.
        """
        options = []
        for names in self._policy_orders():
            found = self._smallest_candidates(names)
            needed = found.needed(outside)
            best = _first(needed, found.seconds)
            options.append(
                self._assignment(names, found.bounds[best], int(needed[best]), float(found.seconds[best]))
            )
        return min(options, key=lambda assignment: (assignment.needed, assignment.seconds))

    def _lowest_memory_bounds(self, names: Sequence[str]) -> np.ndarray:
        """Boundaries of the candidates for the lowest memory."""
        L, num_policies = self.num_layers, len(ON_DEVICE)
        most_offloaded = 0
        if names[0] in OFFLOADING:
            host_bytes = np.iinfo(np.int64).max if self.host is None else self.host
            most_offloaded = int(np.searchsorted(self.policies[names[0]].host, host_bytes, side="right")) - 1
        rows = []
        for offloaded in {0, max(most_offloaded - 1, 0), most_offloaded}:
            for last in range(num_policies):  # the policy of the last layer
                for rest in (L, max(L - 1, offloaded)):
                    inner = [rest] * last + [L] * (num_policies - 1 - last)
                    rows.append([0, *([offloaded] if names[0] in OFFLOADING else []), *inner, L])
        return np.array(rows, np.int64)

    def _policy_orders(self) -> list[tuple[str, ...]]:
        """Tuples of policies that one assignment may combine, in layer order."""
        return [(policy, *ON_DEVICE) for policy in self.offload_policies] or [ON_DEVICE]

    def _fastest_of(self, names: Sequence[str], outside: BytesOutsideBlocks, limit: int) -> Assignment | None:
        candidates, needed, seconds = self._within_limit(self._grid_candidates(names), outside, limit)
        if not len(candidates):
            return None
        if self._step > 1:
            first = np.argsort(seconds, kind="stable")[:REFINED]
            nearby = np.concatenate([self._neighbours(candidates[i]) for i in first])
            found = self._measure(names, _distinct(nearby, self.num_layers))
            finer = self._within_limit(found, outside, limit)
            if len(finer[0]) and finer[2].min() < seconds.min():
                candidates, needed, seconds = finer
        # The lowest memory of equally fast assignments.
        best = _first(seconds, needed)
        return self._assignment(names, candidates[best], int(needed[best]), float(seconds[best]))

    def _within_limit(
        self, candidates: _Candidates, outside: BytesOutsideBlocks, limit: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        needed = candidates.needed(outside)
        fits = np.flatnonzero(needed <= limit)
        return candidates.bounds[fits], needed[fits], candidates.seconds[fits]

    def _grid_candidates(self, names: Sequence[str]) -> _Candidates:
        """All boundaries on the grid."""
        key = ("grid", *names)
        if key not in self._measured:
            self._measured[key] = self._measure(names, _grid(self.num_layers, self._step, len(names)))
        return self._measured[key]

    def _smallest_candidates(self, names: Sequence[str]) -> _Candidates:
        """Candidates for the lowest memory."""
        key = ("smallest", *names)
        if key not in self._measured:
            self._measured[key] = self._measure(names, self._lowest_memory_bounds(names))
        return self._measured[key]

    def _measure(self, names: Sequence[str], bounds: np.ndarray) -> _Candidates:
        """Bytes and seconds of each row of boundaries that the host's memory allows."""
        if self.host is not None and names[0] in OFFLOADING:
            bounds = bounds[self.policies[names[0]].host[bounds[:, 1]] <= self.host]
        count = len(bounds)
        saved = np.zeros(count, np.int64)
        forward = np.full(count, LOWEST)
        backward = forward.copy()
        seconds = np.zeros(count, np.float64)
        resident = self._resident(names, bounds)
        for column, name in enumerate(names):
            policy, start, stop = self.policies[name], bounds[:, column], bounds[:, column + 1]
            offset = saved - policy.on_device[start]
            forward = np.maximum(forward, policy.peak_forward[start, stop] + offset)
            reloaded = 0 if name in OFFLOADING else resident
            backward = np.maximum(backward, policy.peak_backward[start, stop] + offset + reloaded)
            saved = offset + policy.on_device[stop]
            seconds = seconds + policy.seconds[stop] - policy.seconds[start]
        return _Candidates(bounds, forward, saved + resident, backward, seconds)

    def _resident(self, names: Sequence[str], bounds: np.ndarray) -> np.ndarray:
        """Bytes of the last offloaded activations: still on the device when backward reads them."""
        if names[0] not in OFFLOADING:
            return np.zeros(len(bounds), np.int64)
        policy, end = self.policies[names[0]], bounds[:, 1]
        last = np.concatenate([np.zeros(1, np.int64), policy.host_per_layer])
        resident: np.ndarray = last[end]
        return resident

    @property
    def _step(self) -> int:
        return -(-self.num_layers // GRID)

    @cached_property
    def _measured(self) -> dict[tuple[str, ...], _Candidates]:
        return {}

    def _neighbours(self, bounds: np.ndarray) -> np.ndarray:
        """Boundaries that differ by less than one grid step."""
        inner = bounds[1:-1]
        offsets = np.arange(1 - self._step, self._step)
        shifts = np.stack(np.meshgrid(*[offsets] * len(inner), indexing="ij"), -1).reshape(-1, len(inner))
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


def _first(keys: np.ndarray, ties: np.ndarray) -> int:
    """Index of the lowest key, of equals the one with the lowest tie, of equals the first."""
    lowest = np.flatnonzero(keys == keys.min())
    return int(lowest[np.argmin(ties[lowest])])


def _distinct(bounds: np.ndarray, num_layers: int) -> np.ndarray:
    """The distinct rows of boundaries in lexicographic order, compared as digits of one number."""
    weights = (num_layers + 1) ** np.arange(bounds.shape[1] - 2, -1, -1, dtype=np.int64)
    _, index = np.unique(bounds[:, :-1] @ weights, return_index=True)
    rows: np.ndarray = bounds[index]
    return rows


@cache
def _grid(num_layers: int, step: int, count: int) -> np.ndarray:
    """Rows of boundaries 0 ≤ b₁ ≤ … ≤ L of `count` policies, on every `step`-th layer."""
    positions = np.unique([*range(0, num_layers, step), num_layers])
    return _boundaries(positions, count)


def _boundaries(positions: np.ndarray, count: int) -> np.ndarray:
    """Rows of count + 1 boundaries: 0, then nondecreasing positions, then the last position."""
    rows = np.zeros((1, 1), np.int64)
    for _ in range(count - 1):
        last = rows[:, -1]
        rows = np.concatenate(
            [
                np.column_stack([rows[last <= position], np.full((last <= position).sum(), position)])
                for position in positions
            ]
        )
    return np.column_stack([rows, np.full(len(rows), positions[-1])])
