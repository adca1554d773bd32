"""Mixing sources: which window of which source comes next, exactly proportional and a function of (seed,
epoch).

# S sources, E windows of an epoch

An epoch is one pass over the sources that are trained on (`weight` passes where a source has a weight),
with replay woven in so that the asked share of all windows comes from the replay sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trimtab.data.order import shuffled
from trimtab.facts.errors import DataError
from trimtab.facts.randomness import derive


@dataclass(frozen=True)
class Mixture:
    """How many windows each source gives an epoch: `counts[s]` of `sizes[s]`, train sources first."""

    sizes: tuple[int, ...]
    counts: tuple[int, ...]
    num_train: int

    @property
    def num_windows(self) -> int:
        """Of one epoch, replay included."""
        return sum(self.counts)

    @property
    def replay_share(self) -> float:
        """The share of windows that are replay, as it came out in whole windows."""
        return sum(self.counts[self.num_train :]) / self.num_windows


def mix(
    train: Sequence[tuple[int, float]], replay: Sequence[tuple[int, float]] = (), replay_share: float = 0.0
) -> Mixture:
    """A mixture of sources given as (windows, weight).

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
    """A DataError for a share of replay that cannot be."""
    if not 0 <= replay_share < 1:
        raise DataError(f"a replay share of {replay_share} is not possible", "give one from 0 up to below 1")
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
    """(source [E], window [E]) in training order.

    A source's windows come in its own shuffled passes, which go on from epoch to epoch; window j of c
    stands at time (j + phase) / c, so that any stretch of the epoch holds each source in proportion, to
    within a window.
    """
    sources, windows, times = [], [], []
    for s, (size, count) in enumerate(zip(mixture.sizes, mixture.counts, strict=True)):
        if not count:
            continue
        draw_C = np.arange(epoch * count, (epoch + 1) * count)
        window_C = np.empty(count, np.int64)
        for turn in range(int(draw_C[0]) // size, int(draw_C[-1]) // size + 1):
            inside_C = draw_C // size == turn
            order = shuffled(size, derive(seed, "order", s, turn))
            window_C[inside_C] = order[draw_C[inside_C] % size]
        phase = (derive(seed, "phase", s, epoch) % (1 << 20)) / (1 << 20)
        sources.append(np.full(count, s, np.int32))
        windows.append(window_C)
        times.append((np.arange(count) + phase) / count)
    order_E = np.argsort(np.concatenate(times), kind="stable")
    return np.concatenate(sources)[order_E], np.concatenate(windows)[order_E]


def own_text_first(
    source_E: np.ndarray, window_E: np.ndarray, num_train: int, opening: int
) -> tuple[np.ndarray, np.ndarray]:
    """The order of a run's first epoch with a train source in its first step, `opening` windows long.

    Where replay alone would fill that step, the first train window changes places with the last of it. Every other
    order, and with 0 any order, stays as it is.
    """
    last, first = min(opening, len(source_E)) - 1, int(np.argmax(source_E < num_train))
    if not opening or first <= last:
        return source_E, window_E
    place_E = np.arange(len(source_E))
    place_E[[last, first]] = first, last
    return source_E[place_E], window_E[place_E]
