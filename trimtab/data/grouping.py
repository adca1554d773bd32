"""Grouping by length: windows of similar length in each microbatch, in an order that stays random.

# E windows of an epoch
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trimtab.data.dealing import StepShape
from trimtab.data.order import shuffled
from trimtab.facts.randomness import derive

MEGA_STEPS = 50
"""Steps whose windows are sorted together, as in Hugging Face's `LengthGroupedSampler`: enough for microbatches with
little padding, few enough for the order of an epoch to stay random."""
MULTIPLE = 8
"""Lengths are rounded up to a multiple of this, which keeps matrix products and attention on their fast paths."""


def grouped_order(lengths_E: np.ndarray, shape: StepShape, seed: int, epoch: int) -> np.ndarray:
    """int64 [E]: the places of an epoch's (already shuffled) windows in the order in which they are trained on.

    The windows of each 50 steps (a mega-batch; fewer in a short epoch) are sorted by length, cut into microbatches, and
    the microbatches shuffled, so that the steps of a mega-batch hold long and short ones alike. The longest microbatch
    comes first: memory is then allocated once, for all that follow.

    Example:
        >>> lengths = np.array([9, 2, 8, 3, 1, 9])
        >>> order = grouped_order(lengths, StepShape(batch_size=2), seed=0, epoch=0)
        >>> lengths[order].reshape(-1, 2).max(1)[0], sorted(order.tolist())
        (np.int64(9), [0, 1, 2, 3, 4, 5])
    """
    count, batch = len(lengths_E), shape.batch_size
    steps = min(max(count // (4 * shape.num_windows), 1), MEGA_STEPS)
    parts = []
    for number, start in enumerate(range(0, count, steps * shape.num_windows)):
        mega_M = lengths_E[start : start + steps * shape.num_windows]
        sorted_M = start + np.argsort(-mega_M, kind="stable")
        whole = len(sorted_M) // batch
        groups_GB = sorted_M[: whole * batch].reshape(whole, batch)
        parts += [groups_GB[shuffled(whole, derive(seed, "lengths", epoch, number))].ravel()]
        parts += [sorted_M[whole * batch :]]  # fewer than a microbatch, and only at the end of the epoch
    order_E = np.concatenate(parts)
    longest = int(np.argmax(lengths_E[order_E])) // batch * batch
    first, found = order_E[:batch].copy(), order_E[longest : longest + batch].copy()
    if len(found) == batch:
        order_E[longest : longest + batch], order_E[:batch] = first, found
    return order_E


def padded_length(lengths: Sequence[int], max_seq_length: int) -> int:
    """Tokens in each row of a microbatch of windows of these lengths.

    Example:
        >>> padded_length([5, 17], 64), padded_length([5, 17], 20), padded_length([], 64)
        (24, 20, 8)
    """
    longest = max(lengths, default=1)
    return min(-(-longest // MULTIPLE) * MULTIPLE, max_seq_length)


def grouped_fill(lengths_E: np.ndarray, batch_size: int, max_seq_length: int) -> float:
    """The share of places that hold a token where windows come in this order, each microbatch as long as its longest.

    Example:
        >>> grouped_fill(np.array([16, 8, 3, 3]), 2, 64)
        0.625
    """
    missing = -len(lengths_E) % batch_size
    rows_GB = np.concatenate([lengths_E, np.zeros(missing, lengths_E.dtype)]).reshape(-1, batch_size)
    longest_G = np.minimum(-(-rows_GB.max(1) // MULTIPLE) * MULTIPLE, max_seq_length)
    places = int(longest_G.sum()) * batch_size - missing * int(longest_G[-1])
    return float(lengths_E.sum()) / places
