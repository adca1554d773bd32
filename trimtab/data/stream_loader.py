"""The loader over streamed sources, with the same interface and determinism as `cached_loader.CachedLoader`.

The number of sequences is not known before everything has been read. Train sources are drawn in proportion to
their bytes until each has been passed once, which ends the epoch; replay sources start over when they end.
Every rank reads the whole stream and uses only its own sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trimtab.data.batch import Batch, collate
from trimtab.data.interface import Loader, LoaderFacts
from trimtab.data.packing import Piece
from trimtab.data.resume_checks import LoaderSettings
from trimtab.data.sampling import StepShape, check_share, rank_microbatches
from trimtab.data.stream_corpus import StreamCorpus
from trimtab.data.stream_sequences import SequenceStream, StreamPosition
from trimtab.facts.errors import DataError


class StreamLoader(Loader):
    """Batches from sources that are read while training; created by `trimtab.data.make_loader`."""

    num_sequences = None
    num_tokens = None
    steps_per_epoch = None
    dropped_tokens = None

    def __init__(
        self,
        train: Sequence[tuple[StreamCorpus, float]],
        replay: Sequence[tuple[StreamCorpus, float]],
        *,
        replay_share: float,
        max_seq_length: int,
        packing: bool,
        shape: StepShape,
        seed: int,
    ) -> None:
        check_share(replay_share, bool(replay))
        for corpus, weight in train:
            if weight != 1:
                raise DataError(
                    f"{corpus.name} has the weight {weight}, but a streamed source has no known length to weight",
                    "leave the weight at 1, or set data.streaming: false",
                )
        replay = replay if replay_share else ()
        self.max_seq_length, self.shape = max_seq_length, shape
        self._num_train, self._replay_share = len(train), replay_share
        self._sizes = [corpus.total_bytes * weight for corpus, weight in [*train, *replay]]
        self._streams = [
            SequenceStream(corpus, max_seq_length, packing, seed, index)
            for index, (corpus, _) in enumerate([*train, *replay])
        ]
        self._counts = [0] * len(self._streams)
        self._epoch = self._draws = 0
        self._tokens = self._places = 0
        self._settings = LoaderSettings(
            seed,
            max_seq_length,
            packing,
            tuple(
                (corpus.name, corpus.fingerprint, corpus.tokenizer.fingerprint, weight)
                for corpus, weight in [*train, *replay]
            ),
            replay_share=replay_share,
        )

    @property
    def fill(self) -> float:
        """The share of non-padding positions in the sequences read so far; 0 before the first."""
        return self._tokens / self._places if self._places else 0.0

    @property
    def facts(self) -> LoaderFacts:
        """The size of an epoch, which is unknown for a stream."""
        return LoaderFacts(None, None, None)

    @property
    def epoch(self) -> float:
        """Epochs completed; within an epoch, estimated from the bytes read."""
        train, sizes = self._streams[: self._num_train], self._sizes[: self._num_train]
        done = sum(stream.share_done * size for stream, size in zip(train, sizes, strict=True))
        return self._epoch + min(done / sum(sizes), 0.999999)

    def notes(self) -> list[str]:
        """No notes yet: what is truncated or left out is reported at the end of a pass over a source."""
        return []

    def next_step(self) -> list[Batch]:
        """The microbatches of this rank for the next step; the last one of an epoch may be smaller."""
        sequences: list[list[Piece]] = []
        while len(sequences) < self.shape.num_sequences and not self._exhausted():
            sequences.append(self._draw())
        self._tokens += sum(len(piece.ids) for sequence in sequences for piece in sequence)
        self._places += len(sequences) * self.max_seq_length
        if self._exhausted():
            self._epoch += 1
            for index, stream in enumerate(self._streams[: self._num_train]):
                stream.start_pass(self._epoch)
                self._counts[index] = 0
        return [
            collate([sequences[i] for i in micro] or [[]], self.max_seq_length, micro[0] if micro else 0)
            for micro in rank_microbatches(range(len(sequences)), self.shape)
        ]

    def position(self) -> dict[str, Any]:
        """Where the next step begins, as JSON: for each source (pass, chunk, file, row, sequence)."""
        return {
            "version": 1,
            "epoch": self._epoch,
            "draws": self._draws,
            "counts": list(self._counts),
            "streams": [stream.position().to_dict() for stream in self._streams],
            "settings": self._settings.to_dict(),
        }

    def restore(self, position: dict[str, Any]) -> None:
        """Continues at a position; raises an error if settings or data changed."""
        self._settings.check(position)
        self._epoch, self._draws = int(position["epoch"]), int(position["draws"])
        self._counts = [int(count) for count in position["counts"]]
        for stream, state in zip(self._streams, position["streams"], strict=True):
            stream.restore(StreamPosition.from_dict(state))

    def close(self) -> None:
        """Stops the reading threads and their processes."""
        for stream in self._streams:
            stream.close()

    def _exhausted(self) -> bool:
        return all(stream.peek() is None for stream in self._streams[: self._num_train])

    def _draw(self) -> list[Piece]:
        draw, share = self._draws, self._replay_share
        replay = int((draw + 1) * share) > int(draw * share)
        group = range(self._num_train, len(self._streams)) if replay else range(self._num_train)
        candidates = [i for i in group if replay or self._streams[i].peek() is not None]
        index = min(candidates, key=lambda i: ((self._counts[i] + 1) / self._sizes[i], i))
        sequence = self._streams[index].take()
        if sequence is None:
            self._streams[index].start_pass(self._streams[index].pass_index + 1)
            sequence = self._streams[index].take()
        assert sequence is not None
        self._draws += 1
        self._counts[index] += 1
        return sequence
