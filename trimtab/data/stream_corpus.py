"""A streamed corpus: a source that is read and tokenized while training, without writing to disk."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from dataclasses import dataclass, field
from typing import ClassVar, Self

from trimtab.data.cached_corpus import CachedCorpus
from trimtab.data.detection import detect
from trimtab.data.fingerprints import (
    as_resumed,
    content_fingerprint,
    stamp_files,
)
from trimtab.data.interface import Corpus, ProgressCallback, Sequences, Summary, silent
from trimtab.data.packing import Piece
from trimtab.data.rendering import Rendering
from trimtab.data.selection import heldout_threshold, is_heldout
from trimtab.data.sources import SourceSpec, resolve
from trimtab.data.stream_sequences import Cursor, PieceReader, SequenceStream, empty_stream_error
from trimtab.data.tokenizer_pool import default_num_proc
from trimtab.data.tokenizing import TokenizerLike, TokenizerSpec
from trimtab.facts.errors import DataError


@dataclass(frozen=True, kw_only=True)
class StreamCorpus(Corpus):
    """A source that is read while training; `side` is `train`, `heldout` or `all`."""

    num_proc: int
    share: float | None = None
    side: str = "all"
    excluded: frozenset[int] = field(default=frozenset(), repr=False)
    streaming: ClassVar[bool] = True
    rendering: Rendering | None = None
    progress: ProgressCallback = field(default=silent, repr=False)

    @property
    def total_bytes(self) -> int:
        """The size of all files on disk."""
        return sum(stamp.size for stamp in self.stamps)

    def split(self, *, share: float | None = None, count: int | None = None) -> tuple[Self, Self]:
        """(train, heldout) by content hash, as in the cached mode; a count would need all hashes first."""
        if share is None:
            raise DataError(
                "a held-out count needs the cached mode",
                "give a share, or set streaming: false",
            )
        heldout_threshold(share)
        return (
            dataclasses.replace(
                self, share=share, side="train", fingerprint=f"{self.fingerprint} train share {share}"
            ),
            dataclasses.replace(
                self, share=share, side="heldout", fingerprint=f"{self.fingerprint} heldout share {share}"
            ),
        )

    def without(self, other: CachedCorpus) -> Self:
        """This source without the documents that are also in `other` (a cached evaluation set)."""
        return dataclasses.replace(
            self,
            excluded=self.excluded | frozenset(other.records_N["hash"].tolist()),
            fingerprint=f"{self.fingerprint} without {other.fingerprint}",
        )

    def eval_sequences(self, max_seq_length: int, *, packing: bool, max_sequences: int | None) -> Sequences:
        """The first sequences, shuffled within their chunk and stored in memory."""
        sequences: list[list[Piece]] = []
        with closing(SequenceStream(self, max_seq_length, packing, 0, 0)) as stream:
            while max_sequences is None or len(sequences) < max_sequences:
                sequence = stream.take()
                if sequence is None:
                    break
                # Copies: a sequence is a view of its chunk, which would otherwise stay in memory.
                sequences.append([piece.copy() for piece in sequence])
        return Sequences(len(sequences), sequences.__getitem__)

    def piece(self, number: int, max_seq_length: int) -> tuple[Piece, bool]:
        """Returns the trained piece with this index, and whether its document continues after it."""
        piece_reader = PieceReader(dataclasses.replace(self, num_proc=1), max_seq_length, True, Cursor())
        seen = 0
        with closing(iter(piece_reader)) as pieces:
            for _, piece in pieces:
                if seen == number:
                    return piece, len(piece.ids) == max_seq_length
                seen += 1
        if not seen:
            raise empty_stream_error(self, piece_reader.counts, max_seq_length)
        raise IndexError(number)

    def includes(self, content_hash: int) -> bool:
        """Whether a document with this content belongs to this side."""
        if content_hash in self.excluded:
            return False
        return self.share is None or is_heldout(content_hash, self.share) == (self.side == "heldout")


def open_stream(
    spec: SourceSpec,
    tokenizer: TokenizerLike | TokenizerSpec,
    *,
    num_proc: int | None = None,
    progress: ProgressCallback = silent,
) -> StreamCorpus:
    """Opens a source for streaming; see `trimtab.data.open_corpus`."""
    tokenizer_spec = tokenizer if isinstance(tokenizer, TokenizerSpec) else TokenizerSpec.of(tokenizer)
    source = as_resumed(resolve(spec), None, sampled=True, progress=progress)
    source = dataclasses.replace(source, form=detect(source))
    rendering = Rendering.of(source, tokenizer_spec.chat)
    stamps = stamp_files(source, None, sampled=True, progress=progress)
    content = content_fingerprint(source, stamps)
    return StreamCorpus(
        name=spec.name,
        fingerprint=content,
        source=source,
        stamps=tuple(stamps),
        content=content,
        tokenizer=tokenizer_spec,
        summary=Summary(0, 0, files=len(source.files), ignored=source.ignored),
        num_proc=num_proc or default_num_proc(),
        rendering=rendering,
        progress=progress,
    )
