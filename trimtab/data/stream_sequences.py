"""Sequences of a streamed source: documents are read, tokenized and packed while training, without writing to disk.

A pass over a source is a series of chunks; a chunk is packed and shuffled exactly as in the cached mode, and
begins at a (file, row, token) from which it can be rebuilt. A position therefore consists of that start, the
chunk's index and the index of the sequence in it.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from trimtab.data.interface import Progress
from trimtab.data.packing import Piece, check_length, pack_chunk
from trimtab.data.readers import SegmentReader
from trimtab.data.sampling import shuffled
from trimtab.data.selection import (
    SourceCounts,
    left_out_note,
    no_documents_error,
    no_sequences_error,
    truncation_note,
)
from trimtab.data.spec import CHUNK_PIECES, chunk_tokens
from trimtab.data.tokenizing import TokenSegment, tokenize
from trimtab.facts.errors import DataError
from trimtab.facts.randomness import derive

if TYPE_CHECKING:
    from trimtab.data.stream_corpus import StreamCorpus


@dataclass(frozen=True)
class Cursor:
    """The start of a chunk, in the document (file, row)."""

    file: int = 0
    row: int = 1
    skip: int = 0
    """Tokens of that document in earlier chunks."""
    taken: int = 0
    """Documents before it in the pass."""


@dataclass(frozen=True)
class StreamPosition:
    """The position of a source's next sequence: pass, chunk, start of the chunk (None: the pass ended), index in it."""

    pass_index: int
    chunk: int
    cursor: Cursor | None
    sequence: int
    rows: tuple[tuple[int, str], ...] | None = None
    """For rows from Python: (row, digest of all rows before it) at the chunk's start and, if in use, at its end."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for a position as JSON."""
        position: dict[str, Any] = {
            "pass": self.pass_index,
            "chunk": self.chunk,
            "cursor": dataclasses.asdict(self.cursor) if self.cursor else None,
            "window": self.sequence,
        }
        return position if self.rows is None else {**position, "rows": [list(row) for row in self.rows]}

    @staticmethod
    def from_dict(saved: Mapping[str, Any]) -> StreamPosition:
        """The inverse of `to_dict`."""
        cursor = Cursor(**saved["cursor"]) if saved["cursor"] is not None else None
        rows = tuple((number, digest) for number, digest in saved.get("rows", []))
        return StreamPosition(int(saved["pass"]), int(saved["chunk"]), cursor, int(saved["window"]), rows)


@dataclass
class Chunk:
    """Packed sequences of one chunk [W], in training order, and the start of the next chunk (None: the pass ends)."""

    sequences: list[list[Piece]]
    following: Cursor | None
    done_bytes: int
    counts: SourceCounts
    """Counts of what was left out since reading began."""


@dataclass
class _Document:
    """The current document: ids that are not yet in a piece (`buffer`), and the number of ids in pieces (`emitted`)."""

    segment: TokenSegment
    taken_before: int
    skip: int
    buffer: np.ndarray = field(default_factory=lambda: np.empty(0, np.uint32))
    emitted: int = 0


class PieceReader:
    """Yields pieces from `start` on, those of long documents as they are read; counts what is left out."""

    def __init__(self, corpus: StreamCorpus, max_seq_length: int, packing: bool, start: Cursor) -> None:
        self.corpus, self.max_seq_length, self.packing, self.start = corpus, max_seq_length, packing, start
        self.reader = SegmentReader(
            corpus.source,
            file=start.file,
            row=start.row,
            taken=start.taken,
            template=corpus.tokenizer.chat is not None,
        )
        self._found: Counter[str] = Counter()

    @property
    def counts(self) -> SourceCounts:
        """Counts of what was left out or truncated so far."""
        return SourceCounts(**self._found, first_error="")

    def __iter__(self) -> Generator[tuple[Cursor, Piece]]:
        """Yields (start of the piece, piece), the same pieces as `packing.pack_documents`."""
        corpus, start, taken = self.corpus, self.start, self.start.taken
        document: _Document | None = None
        for segment in tokenize(self.reader, corpus.tokenizer, corpus.num_proc, corpus.rendering):
            if segment.first:
                resumed = (segment.file, segment.row) == (start.file, start.row)
                document = None
                if corpus.includes(segment.hash):
                    why = segment.unusable
                    if why is None:
                        document = _Document(segment, taken, start.skip if resumed else 0)
                    else:
                        self._leave_out(why, segment)
                taken += 1
            if document is None:
                continue
            if corpus.rendering is not None:
                yield from self._example(segment, document)
            else:
                yield from self._pieces(segment, document)

    def _leave_out(self, why: str, segment: TokenSegment) -> None:
        self._found[why] += 1
        if segment.row_error is not None and self._found[why] == 1:
            text = f"{segment.row_error}; this row is left out, and so are later unusable rows"
            self.corpus.progress(Progress("message", self.corpus.name, message=text))

    def _origin(self, segment: TokenSegment) -> str:
        return f"{self.corpus.stamps[segment.file].name}:{segment.row}"

    def _example(self, segment: TokenSegment, document: _Document) -> Iterator[tuple[Cursor, Piece]]:
        """Yields an example as one piece, truncated to the sequence length."""
        T, trained = self.max_seq_length, segment.trained
        assert trained is not None
        self._found["cut"] += len(segment.ids) > T
        if not trained[1:T].any():
            self._found["lost"] += 1
            return
        cursor = Cursor(segment.file, segment.row, 0, document.taken_before)
        yield cursor, Piece(segment.ids[:T], self._origin(segment), trained[:T])

    def _pieces(self, segment: TokenSegment, document: _Document) -> Iterator[tuple[Cursor, Piece]]:
        T, packing = self.max_seq_length, self.packing
        document.buffer = np.concatenate([document.buffer, segment.ids])
        at, num_buffered = 0, len(document.buffer)
        while num_buffered - at >= (T + 2) or (segment.last and num_buffered > at):
            # Wait for T + 2 ids or the document's end: a full piece must not leave a remainder of one token.
            length = T - 1 if packing and num_buffered - at == T + 1 else min(T, num_buffered - at)
            begin = document.emitted
            document.emitted += length
            if begin >= document.skip and not (begin and not packing):
                cursor = Cursor(segment.file, segment.row, begin, document.taken_before)
                yield cursor, Piece(document.buffer[at : at + length], self._origin(segment))
            at += length
        document.buffer = document.buffer[at:]


def chunks_of(
    corpus: StreamCorpus, max_seq_length: int, packing: bool, start: Cursor, number: int, key: int
) -> Generator[Chunk]:
    """Yields chunks from chunk `number` on, which begins at `start`; `key` determines the order of sequences."""
    piece_reader = PieceReader(corpus, max_seq_length, packing, start)
    reader = piece_reader.reader
    pieces: list[Piece] = []
    tokens = 0
    for cursor, piece in piece_reader:
        if len(pieces) >= CHUNK_PIECES or tokens >= chunk_tokens(max_seq_length):
            sequences = _sequences(pieces, max_seq_length, packing, key, number)
            yield Chunk(sequences, cursor, reader.done_bytes, piece_reader.counts)
            pieces, tokens, number = [], 0, number + 1
        pieces.append(piece)
        tokens += len(piece.ids)
    sequences = _sequences(pieces, max_seq_length, packing, key, number)
    yield Chunk(sequences, None, reader.total_bytes, piece_reader.counts)


def _sequences(
    pieces: list[Piece], max_seq_length: int, packing: bool, key: int, number: int
) -> list[list[Piece]]:
    if packing:
        order, sizes = pack_chunk(np.array([len(piece.ids) for piece in pieces], np.int64), max_seq_length)
        parts = np.split(order, np.cumsum(sizes)[:-1]) if len(sizes) else []
        sequences = [[pieces[i] for i in part.tolist()] for part in parts]
    else:
        sequences = [[piece] for piece in pieces]
    return [sequences[w] for w in shuffled(len(sequences), derive(key, "chunk", number)).tolist()]


def empty_stream_error(corpus: StreamCorpus, counts: SourceCounts, max_seq_length: int) -> DataError:
    """The error for a stream that yielded nothing in a complete pass."""
    name = corpus.display_name if corpus.side == "all" else f"{corpus.display_name} ({corpus.side})"
    if counts.lost:
        return no_sequences_error(name, counts.lost, max_seq_length)
    return no_documents_error(name, counts)


class SequenceStream:
    """Sequences of one source, pass after pass, with one chunk prefetched in a thread.

    `position()` identifies the next sequence; `restore(position)` continues with it.
    """

    def __init__(
        self, corpus: StreamCorpus, max_seq_length: int, packing: bool, seed: int, index: int
    ) -> None:
        check_length(max_seq_length)
        self.corpus, self.max_seq_length, self.packing = corpus, max_seq_length, packing
        self._seed, self._index = seed, index
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="streaming")
        self._chunks: Generator[Chunk] | None = None
        self._prefetched: Future[Chunk] | None = None
        self._chunk: Chunk | None = None
        self._cursor: Cursor | None = Cursor()
        self.pass_index = self._number = self._sequence = self._done_bytes = 0

    def start_pass(self, number: int) -> None:
        """Moves to the beginning of a pass."""
        self._move_to(number, 0, Cursor(), 0)

    def position(self) -> StreamPosition:
        """The position of the next sequence; for rows from Python also digests of the rows before it."""
        position = StreamPosition(self.pass_index, self._number, self._cursor, self._sequence)
        rows = self.corpus.source.spec.rows
        if rows is None or self._cursor is None:
            return position
        ends = [self._cursor]
        if self._chunk is not None and self._sequence:
            ends.append(self._chunk.following or Cursor(row=rows.count + 1))
        # A document in which a chunk ends belongs to that chunk.
        numbers = [cursor.row + (cursor.skip > 0) for cursor in ends]
        return dataclasses.replace(
            position, rows=tuple((number, rows.digest_before(number)) for number in numbers)
        )

    def restore(self, position: StreamPosition) -> None:
        """Continues at a position."""
        rows = self.corpus.source.spec.rows
        if rows is not None:
            for number, digest in position.rows or ():
                rows.check(number, digest)
        self._move_to(position.pass_index, position.chunk, position.cursor, position.sequence)

    @property
    def share_done(self) -> float:
        """The approximate share of the pass's bytes that has been read."""
        if self._cursor is None:
            return 1.0
        done = float(self._done_bytes)
        if self._chunk is not None and self._chunk.sequences:
            done += (self._chunk.done_bytes - done) * self._sequence / len(self._chunk.sequences)
        return done / max(1, self.corpus.total_bytes)

    def peek(self) -> list[Piece] | None:
        """The next sequence of this pass; None at its end."""
        while self._cursor is not None:
            if self._chunk is None:
                self._chunk = self._next_chunk()
            if self._sequence < len(self._chunk.sequences):
                return self._chunk.sequences[self._sequence]
            self._done_bytes = self._chunk.done_bytes
            if self._chunk.following is None and self._number == 0 and not self._chunk.sequences:
                raise empty_stream_error(self.corpus, self._chunk.counts, self.max_seq_length)
            if self._chunk.following is None:
                self._report_left_out(self._chunk.counts)
            self._cursor, self._chunk = self._chunk.following, None
            self._number, self._sequence = self._number + 1, 0
        return None

    def take(self) -> list[Piece] | None:
        """Returns the next sequence and advances past it."""
        sequence = self.peek()
        if sequence is not None:
            self._sequence += 1
        return sequence

    def close(self) -> None:
        """Ends the reading thread and its processes; reports what was left out of the current pass."""
        if self._chunk is not None:
            self._report_left_out(self._chunk.counts)
        self._cancel_prefetch()
        self._thread.shutdown(wait=True)

    def _report_left_out(self, counts: SourceCounts) -> None:
        """Reports what was left out of a pass, or of the part read since the run started or resumed."""
        name, messages = self.corpus.display_name, []
        messages += [f"{name}: {left_out_note(count, why)}" for why, count in counts.left_out().items()]
        if counts.cut:
            messages.append(truncation_note(name, counts.cut, counts.lost, self.max_seq_length))
        for text in messages:
            self.corpus.progress(Progress("message", name, message=text))

    def _move_to(self, pass_index: int, number: int, cursor: Cursor | None, sequence: int) -> None:
        self._cancel_prefetch()
        self.pass_index, self._number, self._cursor, self._sequence = pass_index, number, cursor, sequence
        self._chunk = None
        self._done_bytes = 0

    def _next_chunk(self) -> Chunk:
        if self._prefetched is None:
            assert self._cursor is not None
            key = derive(self._seed, "stream", self._index, self.pass_index)
            self._chunks = chunks_of(
                self.corpus, self.max_seq_length, self.packing, self._cursor, self._number, key
            )
            self._prefetched = self._thread.submit(self._chunks.__next__)
        chunk = self._prefetched.result()
        self._prefetched = None
        if chunk.following is not None:
            assert self._chunks is not None
            self._prefetched = self._thread.submit(self._chunks.__next__)
        return chunk

    def _cancel_prefetch(self) -> None:
        if self._prefetched is not None:
            wait([self._prefetched])
        if self._chunks is not None:
            self._chunks.close()
        self._chunks = self._prefetched = None
