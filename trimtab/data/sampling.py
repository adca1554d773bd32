"""Sampling order: which sequence comes next, and which rank and microbatch it goes to.

Everything is a function of (seed, epoch) and of sizes, and the same under every version of numpy. An epoch is one pass
over the training sources (`weight` passes where a source has a weight), interleaved with replay so that the requested
share of all sequences comes from the replay sources. A step takes the next sequences of that order; they are split over
ranks and microbatches, and grouped by length first where documents are not packed.

# S sources, E sequences of an epoch, N values
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from trimtab.facts.errors import DataError
from trimtab.facts.randomness import derive

Item = TypeVar("Item")

MEGA_STEPS = 50
"""Steps whose sequences are sorted together, as in Hugging Face's `LengthGroupedSampler`: enough for microbatches with
little padding, few enough for the order of an epoch to stay random."""
MULTIPLE = 8
"""Lengths are rounded up to a multiple of this, which keeps matrix products and attention on their fast paths."""


def scramble(values_N: np.ndarray, key: int) -> np.ndarray:
    """uint64 [N]: splitmix64 of values under a key, a pseudorandom bijection."""
    x_N = values_N.astype(np.uint64)
    x_N = (x_N + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key & 0xFFFFFFFFFFFFFFFF)
    x_N = (x_N ^ (x_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x_N = (x_N ^ (x_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x_N ^ (x_N >> np.uint64(31))


def shuffled(count: int, key: int) -> np.ndarray:
    """int64 [count]: a permutation of range(count) that is a function of the key.

    Example:
        >>> sorted(shuffled(5, 1).tolist()), shuffled(5, 1).tolist() == shuffled(5, 1).tolist()
        ([0, 1, 2, 3, 4], True)
    """
    return np.argsort(scramble(np.arange(count), key), kind="stable")


@dataclass(frozen=True)
class Mixture:
    """Sequences that each source contributes per epoch: `counts[s]` of `sizes[s]`, train sources first."""

    sizes: tuple[int, ...]
    counts: tuple[int, ...]
    num_train: int

    @property
    def num_sequences(self) -> int:
        """Sequences per epoch, replay included."""
        return sum(self.counts)

    @property
    def replay_share(self) -> float:
        """The actual share of replay sequences, after rounding to whole sequences."""
        return sum(self.counts[self.num_train :]) / self.num_sequences


def mix(
    train: Sequence[tuple[int, float]], replay: Sequence[tuple[int, float]] = (), replay_share: float = 0.0
) -> Mixture:
    """A mixture of sources given as (sequences, weight).

    Example:
        >>> mix([(90, 1.0)], [(1000, 1.0)], 0.1).counts
        (90, 10)
        >>> mix([(10, 2.0), (30, 1.0)]).counts
        (20, 30)
    """
    check_share(replay_share, bool(replay))
    counts = [max(1, round(size * weight)) for size, weight in train]
    sizes = [size for size, _ in train]
    if replay and replay_share:
        total = max(1, round(sum(counts) * replay_share / (1 - replay_share)))
        counts += apportion(total, [size * weight for size, weight in replay])
        sizes += [size for size, _ in replay]
    return Mixture(tuple(sizes), tuple(counts), len(train))


def check_share(replay_share: float, has_sources: bool) -> None:
    """Raises a DataError for an impossible share of replay."""
    if not 0 <= replay_share < 1:
        raise DataError(f"a replay share of {replay_share} is not possible", "set a share from 0 to below 1")
    if replay_share and not has_sources:
        raise DataError(
            f"a replay share of {replay_share} has no sources", "name replay sources or set it to 0"
        )


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers that sum to `total`, each within one of its exact share (largest remainders first).

    Example:
        >>> apportion(10, [1, 1, 1])
        [4, 3, 3]
    """
    exact = [total * weight / sum(weights) for weight in weights]
    whole = [int(share) for share in exact]
    by_rest = sorted(range(len(exact)), key=lambda s: (whole[s] - exact[s], s))
    for s in by_rest[: total - sum(whole)]:
        whole[s] += 1
    return whole


def epoch_plan(mixture: Mixture, seed: int, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """(source [E], sequence [E]) in training order.

    Each source has its own shuffled passes, which continue from epoch to epoch. Sequence j of c is placed at
    time (j + phase) / c, so that any part of the epoch has each source in proportion, to within one sequence.
    """
    sources, sequences, times = [], [], []
    for s, (size, count) in enumerate(zip(mixture.sizes, mixture.counts, strict=True)):
        if not count:
            continue
        draw_C = np.arange(epoch * count, (epoch + 1) * count)
        sequence_C = np.empty(count, np.int64)
        for pass_index in range(int(draw_C[0]) // size, int(draw_C[-1]) // size + 1):
            inside_C = draw_C // size == pass_index
            order = shuffled(size, derive(seed, "order", s, pass_index))
            sequence_C[inside_C] = order[draw_C[inside_C] % size]
        phase = (derive(seed, "phase", s, epoch) % (1 << 20)) / (1 << 20)
        sources.append(np.full(count, s, np.int32))
        sequences.append(sequence_C)
        times.append((np.arange(count) + phase) / count)
    order_E = np.argsort(np.concatenate(times), kind="stable")
    return np.concatenate(sources)[order_E], np.concatenate(sequences)[order_E]


def train_source_first(
    source_E: np.ndarray, sequence_E: np.ndarray, num_train: int, first_step_sequences: int
) -> tuple[np.ndarray, np.ndarray]:
    """Ensures that a run's first step, of `first_step_sequences` sequences, contains a sequence of a train source.

    If replay alone would fill that step, its last sequence is swapped with the first train sequence. Any other order,
    or any order if `first_step_sequences` is 0, is returned unchanged.
    """
    last, first = min(first_step_sequences, len(source_E)) - 1, int(np.argmax(source_E < num_train))
    if not first_step_sequences or first <= last:
        return source_E, sequence_E
    place_E = np.arange(len(source_E))
    place_E[[last, first]] = first, last
    return source_E[place_E], sequence_E[place_E]


@dataclass(frozen=True)
class StepShape:
    """Sequences per step: `batch_size` × `accumulation` on each of `dp_size` ranks, of which this is
    `dp_rank`.
    """

    batch_size: int
    accumulation: int = 1
    dp_rank: int = 0
    dp_size: int = 1

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.accumulation < 1:
            raise DataError(
                f"a step of {self.batch_size} sequences × {self.accumulation} is empty",
                "set per_device_train_batch_size and gradient_accumulation_steps to 1 or more",
            )
        assert 0 <= self.dp_rank < self.dp_size, (self.dp_rank, self.dp_size)

    @property
    def num_sequences(self) -> int:
        """Sequences of a full step, over all ranks."""
        return self.batch_size * self.accumulation * self.dp_size


def rank_microbatches(items: Sequence[Item], shape: StepShape) -> list[list[Item]]:
    """The microbatches of this rank: a contiguous part of the step's sequences, split into batches.

    The last step of an epoch may have fewer sequences than a full one. They are then spread evenly, and every
    rank still gets the same number of microbatches, empty ones if necessary: ranks that all-gather sharded
    weights must run the model equally often.

    Example:
        >>> rank_microbatches([1, 2, 3, 4, 5], StepShape(2, 3))
        [[1, 2], [3, 4], [5]]
        >>> rank_microbatches([1, 2, 3], StepShape(1, 1, dp_rank=1, dp_size=4))
        [[2]]
        >>> rank_microbatches([1, 2, 3], StepShape(1, 1, dp_rank=3, dp_size=4))
        [[]]
    """
    assert items, "a step is never empty"
    assert len(items) <= shape.num_sequences, (len(items), shape)
    most, extra = divmod(len(items), shape.dp_size)
    start = shape.dp_rank * most + min(shape.dp_rank, extra)
    mine = items[start : start + most + (shape.dp_rank < extra)]
    longest = most + (extra > 0)
    num_micro = -(-longest // shape.batch_size)
    size = shape.batch_size
    return [list(mine[i * size : (i + 1) * size]) for i in range(num_micro)]


def grouped_order(lengths_E: np.ndarray, shape: StepShape, seed: int, epoch: int) -> np.ndarray:
    """int64 [E]: the indices of an epoch's (already shuffled) sequences in training order.

    The sequences of each 50 steps (a mega-batch; fewer in a short epoch) are sorted by length, split into microbatches,
    and these are shuffled, so that the steps of a mega-batch mix long and short ones. The longest microbatch comes
    first, unless it is the last and incomplete one: memory is then allocated once for all later microbatches.

    Example:
        >>> lengths = np.array([9, 2, 8, 3, 1, 9])
        >>> order = grouped_order(lengths, StepShape(batch_size=2), seed=0, epoch=0)
        >>> lengths[order].reshape(-1, 2).max(1)[0], sorted(order.tolist())
        (np.int64(9), [0, 1, 2, 3, 4, 5])
    """
    count, batch = len(lengths_E), shape.batch_size
    steps = min(max(count // (4 * shape.num_sequences), 1), MEGA_STEPS)
    parts = []
    for number, start in enumerate(range(0, count, steps * shape.num_sequences)):
        mega_M = lengths_E[start : start + steps * shape.num_sequences]
        sorted_M = start + np.argsort(-mega_M, kind="stable")
        num_batches = len(sorted_M) // batch
        groups_GB = sorted_M[: num_batches * batch].reshape(num_batches, batch)
        parts += [groups_GB[shuffled(num_batches, derive(seed, "lengths", epoch, number))].ravel()]
        parts += [
            sorted_M[num_batches * batch :]
        ]  # fewer than a microbatch, and only at the end of the epoch
    order_E = np.concatenate(parts)
    longest = int(np.argmax(lengths_E[order_E])) // batch * batch
    first, longest_batch = order_E[:batch].copy(), order_E[longest : longest + batch].copy()
    if len(longest_batch) == batch:
        order_E[longest : longest + batch], order_E[:batch] = first, longest_batch
    return order_E


def padded_length(lengths: Sequence[int], max_seq_length: int) -> int:
    """The padded length of a microbatch of sequences of these lengths.

    Example:
        >>> padded_length([5, 17], 64), padded_length([5, 17], 20), padded_length([], 64)
        (24, 20, 8)
    """
    longest = max(lengths, default=1)
    return min(-(-longest // MULTIPLE) * MULTIPLE, max_seq_length)


def grouped_fill(lengths_E: np.ndarray, batch_size: int, max_seq_length: int) -> float:
    """The share of non-padding positions in this order, each microbatch padded to its longest sequence.

    Example:
        >>> grouped_fill(np.array([16, 8, 3, 3]), 2, 64)
        0.625
    """
    missing = -len(lengths_E) % batch_size
    rows_GB = np.concatenate([lengths_E, np.zeros(missing, lengths_E.dtype)]).reshape(-1, batch_size)
    longest_G = np.minimum(-(-rows_GB.max(1) // MULTIPLE) * MULTIPLE, max_seq_length)
    positions = int(longest_G.sum()) * batch_size - missing * int(longest_G[-1])
    return float(lengths_E.sum()) / positions
