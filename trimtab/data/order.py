"""Deterministic order: a shuffle that is a function of numbers alone, the same under every numpy."""

from __future__ import annotations

import numpy as np


def scramble(values_N: np.ndarray, key: int) -> np.ndarray:
    """uint64 [N]: splitmix64 of values under a key, a bijection that looks random."""
    x_N = values_N.astype(np.uint64)
    x_N = (x_N + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key & 0xFFFFFFFFFFFFFFFF)
    x_N = (x_N ^ (x_N >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x_N = (x_N ^ (x_N >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x_N ^ (x_N >> np.uint64(31))


def shuffled(count: int, key: int) -> np.ndarray:
    """int64 [count]: the numbers below `count` in an order that is a function of the key.

    Example:
        >>> sorted(shuffled(5, 1).tolist()), shuffled(5, 1).tolist() == shuffled(5, 1).tolist()
        ([0, 1, 2, 3, 4], True)
    """
    return np.argsort(scramble(np.arange(count), key), kind="stable")
