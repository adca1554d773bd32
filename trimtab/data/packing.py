"""Packing: splits documents into pieces and packs pieces into sequences; pure functions of lengths.

# N documents, P pieces, W sequences

A document longer than the sequence length is cut into pieces of that length, and the remainder is packed with
other pieces. A remainder of one token would have nothing to predict, so the piece before it is one token
shorter. Pieces are packed chunk by chunk, best-fit decreasing: the longest first, each into the fullest
sequence that still has space for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from trimtab.data.spec import CHUNK_PIECES, MIN_SEQ_LENGTH, chunk_tokens
from trimtab.facts.errors import DataError


class Piece(NamedTuple):
    """A document or a part of one.

    `ids` [length], `origin` as `file:row`, and `trained` [length], which ids are targets (None: all).
    """

    ids: np.ndarray
    origin: str
    trained: np.ndarray | None = None

    def copy(self) -> Piece:
        """A copy of the piece, not a view."""
        return Piece(self.ids.copy(), self.origin, None if self.trained is None else self.trained.copy())


@dataclass(frozen=True)
class Pieces:
    """Pieces of documents, in document order: document index [P], start in the document [P], length [P]."""

    document_P: np.ndarray
    start_P: np.ndarray
    length_P: np.ndarray

    def __len__(self) -> int:
        return len(self.document_P)


@dataclass(frozen=True)
class Packing:
    """Sequences of pieces: sequence w contains the pieces `order_P[bounds_W1[w]:bounds_W1[w + 1]]`.

    `dropped` counts tokens that are in no sequence (only where long documents are truncated: without packing, and
    examples).
    """

    pieces: Pieces
    order_P: np.ndarray
    bounds_W1: np.ndarray
    max_seq_length: int
    dropped: int = 0

    @property
    def num_sequences(self) -> int:
        """The number of sequences per pass."""
        return len(self.bounds_W1) - 1

    @property
    def fill(self) -> float:
        """The share of non-padding positions."""
        positions = self.num_sequences * self.max_seq_length
        return float(self.pieces.length_P.sum()) / positions if positions else 0.0

    def sequence(self, index: int) -> np.ndarray:
        """The pieces of one sequence, in document order."""
        return self.order_P[self.bounds_W1[index] : self.bounds_W1[index + 1]]


def pack_documents(
    lengths_N: np.ndarray, max_seq_length: int, packing: bool = True, *, keep_N: np.ndarray | None = None
) -> Packing:
    """Sequences for documents of these lengths (each at least 2).

    With `keep_N` (bool [N]) documents are examples: they are truncated to the sequence length, since the rest of an
    answer is useless without its question, and only the marked ones are packed.

    Example:
        >>> packed = pack_documents(np.array([6, 3, 5, 2]), 8)
        >>> [packed.sequence(w).tolist() for w in range(packed.num_sequences)], packed.fill
        ([[0, 3], [1, 2]], 1.0)
    """
    check_length(max_seq_length)
    if keep_N is not None or not packing:
        document_P = np.arange(len(lengths_N)) if keep_N is None else np.flatnonzero(keep_N)
        length_P, count = np.minimum(lengths_N[document_P], max_seq_length), len(document_P)
        pieces = Pieces(document_P, np.zeros(count, np.int64), length_P)
        dropped = int(lengths_N.sum() - length_P.sum())
        if not packing:
            return Packing(pieces, np.arange(count), np.arange(count + 1), max_seq_length, dropped)
    else:
        pieces, dropped = cut_documents(lengths_N, max_seq_length), 0
    orders, counts, first = [], [np.zeros(1, np.int64)], 0
    for end in chunk_ends(pieces.length_P, max_seq_length):
        order, sizes = pack_chunk(pieces.length_P[first:end], max_seq_length)
        orders.append(order + first)
        counts.append(sizes)
        first = end
    order_P = np.concatenate(orders) if orders else np.empty(0, np.int64)
    return Packing(pieces, order_P, np.cumsum(np.concatenate(counts)), max_seq_length, dropped)


def check_length(max_seq_length: int) -> None:
    """Raises a DataError for a sequence length that is too small to train on."""
    if max_seq_length < MIN_SEQ_LENGTH:
        raise DataError(f"max_seq_length is {max_seq_length}", f"give {MIN_SEQ_LENGTH} or more")


def piece_lengths(length: int, max_seq_length: int) -> list[int]:
    """The pieces of one document.

    Example:
        >>> piece_lengths(20, 8), piece_lengths(17, 8), piece_lengths(8, 8)
        ([8, 8, 4], [8, 7, 2], [8])
    """
    pieces = [max_seq_length] * (length // max_seq_length)
    rest = length % max_seq_length
    if rest == 1 and pieces:
        pieces[-1] -= 1
        rest = 2
    return [*pieces, rest] if rest else pieces


def cut_documents(lengths_N: np.ndarray, max_seq_length: int) -> Pieces:
    """All pieces of all documents, in order: a vectorized `piece_lengths`."""
    T, lengths_N = max_seq_length, lengths_N.astype(np.int64)
    counts_N = -(-lengths_N // T)
    document_P = np.repeat(np.arange(len(lengths_N)), counts_N)
    first_N = np.cumsum(counts_N) - counts_N
    place_P = np.arange(len(document_P)) - first_N[document_P]
    start_P = place_P * T
    length_P = np.minimum(T, lengths_N[document_P] - start_P)
    lone_P = np.flatnonzero((length_P == 1) & (place_P > 0))
    length_P[lone_P] += 1
    start_P[lone_P] -= 1
    length_P[lone_P - 1] -= 1
    return Pieces(document_P, start_P, length_P)


def chunk_ends(length_P: np.ndarray, max_seq_length: int) -> list[int]:
    """The ends of chunks of pieces: after the piece that reaches the token limit or the piece limit."""
    ends, first, limit = [], 0, chunk_tokens(max_seq_length)
    total_P = np.cumsum(length_P)
    while first < len(length_P):
        before = int(total_P[first - 1]) if first else 0
        reached = int(np.searchsorted(total_P, before + limit)) + 1
        first = min(reached, first + CHUNK_PIECES, len(length_P))
        ends.append(first)
    return ends


def pack_chunk(length_P: np.ndarray, max_seq_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Packs by best-fit decreasing; returns (piece indices by sequence [P], pieces in each sequence [W]).

    Bit s of one integer is set if some open sequence has s free positions. Finding the fullest sequence that
    still fits a piece is then a shift and a lowest set bit: about a microsecond per piece.

    Example:
        >>> order, sizes = pack_chunk(np.array([6, 3, 5, 2]), 8)
        >>> order.tolist(), sizes.tolist()
        ([0, 3, 1, 2], [2, 2])
    """
    sequences: list[list[int]] = []
    by_space: list[list[int]] = [[] for _ in range(max_seq_length + 1)]
    open_spaces = 0
    lengths = length_P.tolist()
    for piece in np.argsort(-length_P, kind="stable").tolist():
        length = lengths[piece]
        assert 0 < length <= max_seq_length, (length, max_seq_length)
        fitting = open_spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            sequence = by_space[space].pop()
            if not by_space[space]:
                open_spaces ^= 1 << space
            sequences[sequence].append(piece)
        else:
            space, sequence = max_seq_length, len(sequences)
            sequences.append([piece])
        remaining = space - length
        if remaining:
            if not by_space[remaining]:
                open_spaces |= 1 << remaining
            by_space[remaining].append(sequence)
    order_P = np.array([piece for sequence in sequences for piece in sorted(sequence)], np.int64)
    return order_P, np.array([len(sequence) for sequence in sequences], np.int64)
