"""Batches: sequences of isolated documents as four tensors, and the fixed batches of an evaluation.

# B sequences, T tokens
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import torch

from trimtab.data.interface import Corpus, Sequences
from trimtab.data.packing import Piece
from trimtab.data.spec import IGNORE_INDEX
from trimtab.facts.errors import DataError


@dataclass
class Batch:
    """Packed sequences, labels already shifted.

    `labels_BT[b, t]` is the token to predict at t, or -100: where that token is not trained on, at the last token
    of a piece, and in padding.
    Positions restart at 0 in each piece; `documents_BT` numbers the pieces of a sequence 0, 1, 2 … and is -1
    in padding.
    """

    input_ids_BT: torch.Tensor
    labels_BT: torch.Tensor
    positions_BT: torch.Tensor
    documents_BT: torch.Tensor
    num_targets: int
    origins: list[list[str]]
    first_sequence: int = 0
    """Index of the first sequence in the batch of the whole step, over all microbatches and ranks."""

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on a device."""
        return Batch(
            self.input_ids_BT.to(device, non_blocking=True),
            self.labels_BT.to(device, non_blocking=True),
            self.positions_BT.to(device, non_blocking=True),
            self.documents_BT.to(device, non_blocking=True),
            self.num_targets,
            self.origins,
            self.first_sequence,
        )


def collate(sequences: Sequence[Sequence[Piece]], max_seq_length: int, first_sequence: int = 0) -> Batch:
    """A batch of sequences, each a list of pieces that together fit into `max_seq_length`.

    `first_sequence` is the index of the first one in its step.

    Example:
        >>> pieces = [Piece(np.array([5, 6, 7]), "a.txt:1"), Piece(np.array([8, 9]), "a.txt:2")]
        >>> batch = collate([pieces], 6)
        >>> batch.input_ids_BT.tolist(), batch.labels_BT.tolist()
        ([[5, 6, 7, 8, 9, 0]], [[6, 7, -100, 9, -100, -100]])
        >>> batch.positions_BT.tolist(), batch.documents_BT.tolist(), batch.num_targets
        ([[0, 1, 2, 0, 1, 0]], [[0, 0, 0, 1, 1, -1]], 3)
        >>> collate([[Piece(np.array([5, 6, 7]), "a.jsonl:1", np.array([0, 0, 1]))]], 3).labels_BT.tolist()
        [[-100, 7, -100]]
    """
    B, T = len(sequences), max_seq_length
    ids_BT = np.zeros((B, T), np.int64)
    labels_BT = np.full((B, T), IGNORE_INDEX, np.int64)
    positions_BT = np.zeros((B, T), np.int64)
    documents_BT = np.full((B, T), -1, np.int32)
    count_T = np.arange(T)
    num_targets = 0
    for b, sequence in enumerate(sequences):
        start = 0
        for number, (ids, _, trained) in enumerate(sequence):
            end = start + len(ids)
            ids_BT[b, start:end] = ids
            labels_BT[b, start : end - 1] = ids[1:]
            if trained is not None:
                labels_BT[b, start : end - 1][trained[1:] == 0] = IGNORE_INDEX
                num_targets += int(np.count_nonzero(trained[1:])) - (len(ids) - 1)
            positions_BT[b, start:end] = count_T[: end - start]
            documents_BT[b, start:end] = number
            num_targets += len(ids) - 1
            start = end
        assert start <= T, (start, T)
        positions_BT[b, start:] = count_T[: T - start]
    return Batch(
        torch.from_numpy(ids_BT),
        torch.from_numpy(labels_BT),
        torch.from_numpy(positions_BT),
        torch.from_numpy(documents_BT),
        num_targets,
        [[piece.origin for piece in sequence] for sequence in sequences],
        first_sequence,
    )


class EvalBatches(Sequence[Batch]):
    """A fixed sequence of batches, built lazily."""

    def __init__(self, sequences: Sequences, batch_size: int, max_seq_length: int) -> None:
        self.num_sequences = sequences.count
        self._sequence, self._batch_size, self._max_seq_length = sequences.get, batch_size, max_seq_length

    def __len__(self) -> int:
        return math.ceil(self.num_sequences / self._batch_size)

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
        sequences = range(start, min(start + self._batch_size, self.num_sequences))
        return collate([self._sequence(i) for i in sequences], self._max_seq_length)


def eval_batches(
    corpus: Corpus,
    *,
    batch_size: int,
    max_seq_length: int,
    max_sequences: int | None = None,
    packing: bool = True,
) -> EvalBatches:
    """Batches of a corpus for evaluation: all sequences, or `max_sequences` sampled from all of it.

    The sample depends on the corpus alone, so that every evaluation of a run, and of the next run, sees the
    same text. From a stream the first sequences are taken, shuffled within their chunk.

    Example:
        >>> batches = eval_batches(heldout, batch_size=8, max_seq_length=64, max_sequences=64)  # doctest: +SKIP
        >>> len(batches)  # doctest: +SKIP
        8
    """
    if max_sequences is not None and max_sequences < 1:
        raise DataError(f"an evaluation of {max_sequences} sequences is empty", "give 1 or more")
    sequences = corpus.eval_sequences(max_seq_length, packing=packing, max_sequences=max_sequences)
    return EvalBatches(sequences, batch_size, max_seq_length)
