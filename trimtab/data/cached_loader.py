"""The loader over cached corpora: deterministic, rank-aware, restorable at every step.

The order of an epoch's sequences is a function of (seed, epoch); each step takes the next sequences of it.
So a position is two numbers, and batch size × gradient accumulation of 1 × 16, 4 × 4 and 16 × 1 see the same
sequences in each step, on any number of ranks.

# E sequences of an epoch, P pieces
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np

from trimtab.data.batch import Batch, collate
from trimtab.data.cached_corpus import CachedCorpus, PackedCorpus
from trimtab.data.interface import Loader, LoaderFacts
from trimtab.data.packing import Piece
from trimtab.data.resume_checks import LoaderSettings
from trimtab.data.sampling import (
    Mixture,
    StepShape,
    epoch_plan,
    grouped_fill,
    grouped_order,
    mix,
    padded_length,
    rank_microbatches,
    train_source_first,
)
from trimtab.data.selection import truncation_note

MIN_PADDING_SAVED = 0.1
"""The share of padding that grouping must save for `notes` to recommend it."""


class CachedLoader(Loader):
    """Batches from cached corpora, whose sequences are all known; created by `trimtab.data.make_loader`."""

    def __init__(
        self,
        train: Sequence[tuple[CachedCorpus, float]],
        replay: Sequence[tuple[CachedCorpus, float]],
        *,
        replay_share: float,
        max_seq_length: int,
        packing: bool,
        shape: StepShape,
        seed: int,
        group_by_length: bool = False,
        train_source_first: bool = True,
    ) -> None:
        assert not (packing and group_by_length), "packed sequences have no lengths to group by"
        self.max_seq_length = max_seq_length
        self.packing, self.group_by_length = packing, group_by_length
        self.shape = shape
        self.seed = seed
        self.packed = [PackedCorpus(corpus, max_seq_length, packing) for corpus, _ in [*train, *replay]]
        sized = [
            (packed.packing.num_sequences, weight)
            for packed, (_, weight) in zip(self.packed, [*train, *replay], strict=True)
        ]
        self.mixture: Mixture = mix(sized[: len(train)], sized[len(train) :], replay_share)
        self._settings = LoaderSettings(
            seed,
            max_seq_length,
            packing,
            tuple(
                (
                    packed.corpus.name,
                    packed.corpus.fingerprint,
                    packed.corpus.tokenizer.fingerprint,
                    size,
                    count,
                )
                for packed, size, count in zip(
                    self.packed, self.mixture.sizes, self.mixture.counts, strict=False
                )
            ),
            group_by_length=(shape.batch_size, shape.num_sequences) if group_by_length else None,
        )
        self._epoch = self._sequence = 0
        self._first_step_sequences = shape.num_sequences if train_source_first else 0
        self._plan: tuple[int, tuple[np.ndarray, np.ndarray]] | None = None

    @property
    def num_sequences(self) -> int:
        """Sequences of one epoch, over all ranks, replay included."""
        return self.mixture.num_sequences

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch, the last of which may be smaller."""
        return math.ceil(self.num_sequences / self.shape.num_sequences)

    @property
    def num_tokens(self) -> int:
        """Approximate tokens per epoch: each source's mean sequence length times the sequences drawn from it."""
        return round(
            sum(
                int(packed.packing.pieces.length_P.sum()) * count / packed.packing.num_sequences
                for packed, count in zip(self.packed, self.mixture.counts, strict=False)
            )
        )

    @property
    def fill(self) -> float:
        """The share of non-padding positions in the microbatches of an epoch."""
        if self.group_by_length:
            return self._grouped_fill
        return self.num_tokens / (self.num_sequences * self.max_seq_length)

    @property
    def facts(self) -> LoaderFacts:
        """The size of an epoch, for the planner."""
        return LoaderFacts(self.num_sequences, self.num_tokens, self.fill, self._attended_share())

    def _attended_share(self) -> float:
        """The mean over sources, weighted by the sequences drawn from each."""
        pairs = 0.0
        for packed, count in zip(self.packed, self.mixture.counts, strict=False):
            lengths_P = packed.packing.pieces.length_P.astype(np.float64)
            pairs += float((lengths_P * (lengths_P + 1) / 2).sum()) * count / packed.packing.num_sequences
        return pairs / (self.num_sequences * self.max_seq_length * (self.max_seq_length + 1) / 2)

    @cached_property
    def _grouped_fill(self) -> float:
        """The fill of the first epoch if it were grouped by length, even if grouping is off."""
        source_E, sequence_E = self._grouped(epoch_plan(self.mixture, self.seed, 0), 0)
        return grouped_fill(self._lengths(source_E, sequence_E), self.shape.batch_size, self.max_seq_length)

    def _lengths(self, source_E: np.ndarray, sequence_E: np.ndarray) -> np.ndarray:
        """Lengths of sequences of one document each."""
        lengths_E = np.empty(len(source_E), np.int64)
        for source, packed in enumerate(self.packed):
            of_it = source_E == source
            lengths_E[of_it] = packed.packing.pieces.length_P[packed.packing.order_P[sequence_E[of_it]]]
        return lengths_E

    @property
    def dropped_tokens(self) -> int:
        """Tokens that are in no sequence: ends of long documents when packing is off, otherwise none."""
        return sum(packed.packing.dropped for packed in self.packed)

    def notes(self) -> list[str]:
        """Sentences about what is truncated or left out, one per source, and about padding."""
        notes = [
            truncation_note(packed.corpus.display_name, packed.cut, packed.lost, self.max_seq_length)
            for packed in self.packed
            if packed.cut
        ]
        return [*notes, *self._padding_note()]

    def _padding_note(self) -> list[str]:
        """For sequences of one document each: the share of padding, with and without grouping by length."""
        if self.packing:
            return []
        padded = 1 - self.num_tokens / (self.num_sequences * self.max_seq_length)
        grouped = 1 - self._grouped_fill
        if self.group_by_length:
            return [f"group_by_length: {grouped:.0%} of all tokens are padding, instead of {padded:.0%}"]
        if padded - grouped < MIN_PADDING_SAVED:
            return []
        return [
            f"packing: false pads every document to max_seq_length: {padded:.0%} of all tokens are padding; "
            f"group_by_length: true would reduce it to {grouped:.0%}"
        ]

    @property
    def epoch(self) -> float:
        """Epochs completed: 1.5 is the middle of the second."""
        return self._epoch + self._sequence / self.num_sequences

    def next_step(self) -> list[Batch]:
        """The microbatches of this rank for the next step; the last one of an epoch may be smaller."""
        source_E, sequence_E = self._epoch_plan()
        end = min(self._sequence + self.shape.num_sequences, self.num_sequences)
        batches = []
        for micro in rank_microbatches(range(self._sequence, end), self.shape):
            sequences = [self.packed[int(source_E[i])].sequence(int(sequence_E[i])) for i in micro]
            first = micro[0] - self._sequence if micro else 0
            batches.append(collate(sequences or [[]], self._row_length(sequences), first))
        self._sequence = end
        if end == self.num_sequences:
            self._epoch, self._sequence = self._epoch + 1, 0
        return batches

    def position(self) -> dict[str, Any]:
        """Where the next step begins, as JSON; `restore` continues there exactly."""
        return {
            "version": 1,
            "epoch": self._epoch,
            "window": self._sequence,
            "opening": self._first_step_sequences,
            "settings": self._settings.to_dict(),
        }

    def restore(self, position: dict[str, Any]) -> None:
        """Continues at a position. Raises CheckpointError or DataError if settings or data changed."""
        self._settings.check(position)
        self._epoch, self._sequence = int(position["epoch"]), int(position["window"])
        # Runs of earlier versions, in which replay alone could fill the first step, keep their order.
        self._first_step_sequences, self._plan = int(position.get("opening", 0)), None

    def close(self) -> None:
        """Does nothing: no threads or processes are open."""

    def _row_length(self, sequences: list[list[Piece]]) -> int:
        """The padded sequence length of a microbatch."""
        if not self.group_by_length:
            return self.max_seq_length
        return padded_length(
            [len(piece.ids) for sequence in sequences for piece in sequence], self.max_seq_length
        )

    def _epoch_plan(self) -> tuple[np.ndarray, np.ndarray]:
        if self._plan is None or self._plan[0] != self._epoch:
            self._plan = (self._epoch, self._ordered(self._epoch))
        return self._plan[1]

    def _ordered(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        order = epoch_plan(self.mixture, self.seed, epoch)
        if self.group_by_length:
            order = self._grouped(order, epoch)
        return (
            train_source_first(*order, self.mixture.num_train, self._first_step_sequences)
            if epoch == 0
            else order
        )

    def _grouped(self, order: tuple[np.ndarray, np.ndarray], epoch: int) -> tuple[np.ndarray, np.ndarray]:
        place_E = grouped_order(self._lengths(*order), self.shape, self.seed, epoch)
        return order[0][place_E], order[1][place_E]
