"""Evaluation batches: the same windows every time they are asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import overload

import numpy as np

from trimtab.data.batch import Batch, Piece, collate
from trimtab.data.corpus import Corpus
from trimtab.data.loader import PackedCorpus
from trimtab.data.sampling import shuffled
from trimtab.data.stream_corpus import StreamCorpus
from trimtab.data.streaming import WindowStream
from trimtab.facts.errors import DataError
from trimtab.facts.randomness import derive


class EvalBatches(Sequence[Batch]):
    """A fixed sequence of batches, made when they are asked for."""

    def __init__(
        self, num_windows: int, window: Callable[[int], list[Piece]], batch_size: int, max_seq_length: int
    ) -> None:
        self.num_windows = num_windows
        self._window, self._batch_size, self._max_seq_length = window, batch_size, max_seq_length

    def __len__(self) -> int:
        return math.ceil(self.num_windows / self._batch_size)

    @overload
    def __getitem__(self, index: int) -> Batch: ...
    @overload
    def __getitem__(self, index: slice) -> list[Batch]: ...
    def __getitem__(self, index: int | slice) -> Batch | list[Batch]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        start = index % len(self) * self._batch_size
        windows = range(start, min(start + self._batch_size, self.num_windows))
        return collate([self._window(i) for i in windows], self._max_seq_length)


def eval_batches(
    corpus: Corpus | StreamCorpus,
    *,
    batch_size: int,
    max_seq_length: int,
    max_windows: int | None = None,
    packing: bool = True,
) -> EvalBatches:
    """Batches of a corpus for evaluation: all windows, or `max_windows` drawn from everywhere in it.

    The draw depends on the corpus alone, so that every evaluation of a run, and of the next run, sees the
    same text. From a stream the first windows are taken, shuffled within their chunk.

    Example:
        >>> batches = eval_batches(heldout, batch_size=8, max_seq_length=64, max_windows=64)  # doctest: +SKIP
        >>> len(batches)  # doctest: +SKIP
        8
    """
    if max_windows is not None and max_windows < 1:
        raise DataError(f"an evaluation of {max_windows} windows sees nothing", "give 1 or more")
    if isinstance(corpus, StreamCorpus):
        held = _streamed(corpus, max_seq_length, packing, max_windows)
        return EvalBatches(len(held), held.__getitem__, batch_size, max_seq_length)
    packed = PackedCorpus(corpus, max_seq_length, packing)
    count = packed.packing.num_windows
    chosen = np.arange(count)
    if max_windows is not None and max_windows < count:
        chosen = np.sort(shuffled(count, derive(0, "evaluation"))[:max_windows])
    return EvalBatches(len(chosen), lambda i: packed.window(int(chosen[i])), batch_size, max_seq_length)


def _streamed(
    corpus: StreamCorpus, max_seq_length: int, packing: bool, max_windows: int | None
) -> list[list[Piece]]:
    stream = WindowStream(corpus, max_seq_length, packing, 0, 0)
    held: list[list[Piece]] = []
    try:
        while max_windows is None or len(held) < max_windows:
            window = stream.take()
            if window is None:
                break
            # Copies: a window is a view of its chunk, which would otherwise stay in memory.
            held.append([_copied(piece) for piece in window])
    finally:
        stream.close()
    return held


def _copied(piece: Piece) -> Piece:
    return Piece(piece.ids.copy(), piece.origin, None if piece.trained is None else piece.trained.copy())
