"""A corpus in the token cache: memory-mapped documents, views of subsets, and packed sequences.

# N documents
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Self

import numpy as np

from trimtab.data.cache import CacheEntry
from trimtab.data.interface import Corpus, Sequences
from trimtab.data.packing import Packing, Piece, pack_documents
from trimtab.data.sampling import shuffled
from trimtab.data.selection import heldout_mask, no_sequences_error
from trimtab.facts.errors import DataError
from trimtab.facts.randomness import derive


@dataclass(frozen=True, kw_only=True)
class CachedCorpus(Corpus):
    """Documents of one source as tokens; views made by `split` and `without` share the same files.

    Example:
        >>> corpus = open_corpus(SourceSpec("books/"), tokenizer, cache_dir=Path("cache"))  # doctest: +SKIP
        >>> train, heldout = corpus.split(share=0.01)  # doctest: +SKIP
        >>> heldout.tokens(0)[:3], heldout.origin(0)  # doctest: +SKIP
        (array([ 17, 512,   9], dtype=uint16), 'emma.txt:1')
    """

    entry: CacheEntry
    starts_N: np.ndarray
    lengths_N: np.ndarray
    records_N: np.ndarray
    streaming: ClassVar[bool] = False

    @property
    def num_documents(self) -> int:
        """Documents of this view."""
        return len(self.lengths_N)

    @property
    def num_tokens(self) -> int:
        """Tokens of this view, including beginning and end tokens."""
        return int(self.lengths_N.sum())

    def tokens(self, document: int) -> np.ndarray:
        """Token ids [length] of one document, as a view."""
        start = int(self.starts_N[document])
        return self.entry.tokens[start : start + int(self.lengths_N[document])]

    def trained(self, document: int) -> np.ndarray | None:
        """uint8 [length]: 1 for the trained tokens of one document; None if all tokens are trained on."""
        if self.entry.trained is None:
            return None
        start = int(self.starts_N[document])
        return self.entry.trained[start : start + int(self.lengths_N[document])]

    @property
    def masked(self) -> bool:
        """Whether documents are examples with a loss mask."""
        return self.entry.trained is not None

    def targets_N(self, max_seq_length: int) -> np.ndarray:
        """int64 [N]: trained tokens among each document's first `max_seq_length`; its first token is never a target."""
        ends_N = self.starts_N + np.minimum(self.lengths_N, max_seq_length)
        if self.entry.trained is None:
            return ends_N - self.starts_N - 1
        counts_N = np.empty(len(ends_N), np.int64)
        for first in range(0, len(ends_N), 4096):  # a few MB of running sums at a time
            part = slice(first, first + 4096)
            low, high = int(self.starts_N[part].min()), int(ends_N[part].max())
            sums = np.concatenate([[0], np.cumsum(self.entry.trained[low:high], dtype=np.int64)])
            counts_N[part] = sums[ends_N[part] - low] - sums[self.starts_N[part] - low + 1]
        return counts_N

    def origin(self, document: int) -> str:
        """`file:row` of one document, for messages."""
        record = self.records_N[document]
        return f"{self.stamps[int(record['file'])].name}:{int(record['row'])}"

    def split(self, *, share: float | None = None, count: int | None = None) -> tuple[Self, Self]:
        """(train, heldout): by content hash, so that no document is on both sides.

        A corpus of one distinct document is split within it instead: its last tokens are held out.
        """
        if self.num_documents == 1 or len(np.unique(self.records_N["hash"])) == 1:
            if self.masked:
                raise DataError(
                    f"{self.display_name} contains {self._copies}one example, which cannot be split to hold out a part",
                    "add examples, name an evaluation set under data.eval.domain, or set data.eval_share: 0",
                )
            return self._split_tail(share if share is not None else 0.1)
        mask_N = heldout_mask(self.records_N["hash"], share, count)
        what = f"share {share}" if share is not None else f"count {count}"
        return self._view(~mask_N, f"train {what}"), self._view(mask_N, f"heldout {what}")

    def without(self, other: CachedCorpus) -> Self:
        """This corpus without the documents that are also in `other` (such as an evaluation set)."""
        mask_N = ~np.isin(self.records_N["hash"], other.records_N["hash"])
        if mask_N.all():
            return self
        if not mask_N.any():
            raise DataError(
                f"every document of {self.display_name} is also in {other.display_name}",
                "name other text under data.eval, or remove it from data.train",
            )
        return self._view(mask_N, f"without {other.fingerprint}")

    def eval_sequences(self, max_seq_length: int, *, packing: bool, max_sequences: int | None) -> Sequences:
        """All sequences, or a sample of `max_sequences`; the sample depends on the corpus alone."""
        packed = PackedCorpus(self, max_seq_length, packing)
        count = packed.packing.num_sequences
        chosen = np.arange(count)
        if max_sequences is not None and max_sequences < count:
            chosen = np.sort(shuffled(count, derive(0, "evaluation"))[:max_sequences])
        return Sequences(len(chosen), lambda i: packed.sequence(int(chosen[i])))

    def piece(self, number: int, max_seq_length: int) -> tuple[Piece, bool]:
        """Returns the trained piece with this index, and whether its document continues after it."""
        pieces_P = PackedCorpus(self, max_seq_length, True).packing.pieces
        document, start = int(pieces_P.document_P[number]), int(pieces_P.start_P[number])
        end = start + int(pieces_P.length_P[number])
        trained = self.trained(document)
        mask = None if trained is None else trained[start:end]
        piece = Piece(self.tokens(document)[start:end], self.origin(document), mask)
        return piece, end < int(self.lengths_N[document])

    def _view(self, mask_N: np.ndarray, what: str) -> Self:
        return self._replace(self.starts_N[mask_N], self.lengths_N[mask_N], self.records_N[mask_N], what)

    def _split_tail(self, share: float) -> tuple[Self, Self]:
        kept_N = (self.lengths_N[:1] * (1 - share)).astype(np.int64)
        rest_N = self.lengths_N[:1] - kept_N
        if kept_N[0] < 2 or rest_N[0] < 2:
            raise DataError(
                f"{self.display_name} contains {self._copies}one document of {self.lengths_N[0]} tokens, too short to "
                "hold out a part",
                "add text, name an evaluation set under data.eval.domain, or set data.eval_share: 0",
            )
        start_N, record_N = self.starts_N[:1], self.records_N[:1]
        return (
            self._replace(start_N, kept_N, record_N, f"head {share}"),
            self._replace(start_N + kept_N, rest_N, record_N, f"tail {share}"),
        )

    @property
    def _copies(self) -> str:
        """The number of copies in a corpus of one distinct document, for messages."""
        return f"{self.num_documents} copies of " if self.num_documents > 1 else ""

    def _replace(self, starts_N: np.ndarray, lengths_N: np.ndarray, records_N: np.ndarray, what: str) -> Self:
        summary = dataclasses.replace(self.summary, documents=len(lengths_N), tokens=int(lengths_N.sum()))
        return dataclasses.replace(
            self,
            fingerprint=f"{self.fingerprint} {what}",
            summary=summary,
            starts_N=starts_N,
            lengths_N=lengths_N,
            records_N=records_N,
        )


class PackedCorpus:
    """A corpus packed into sequences of one length."""

    def __init__(self, corpus: CachedCorpus, max_seq_length: int, packing: bool) -> None:
        self.corpus = corpus
        self.cut = self.lost = 0
        """Examples longer than a sequence, and examples left out because nothing within the sequence is trained on."""
        keep_N = None
        if corpus.masked:
            keep_N = corpus.targets_N(max_seq_length) > 0
            self.cut = int(np.count_nonzero(corpus.lengths_N > max_seq_length))
            self.lost = int(np.count_nonzero(~keep_N))
        self.packing: Packing = pack_documents(corpus.lengths_N, max_seq_length, packing, keep_N=keep_N)
        if not self.packing.num_sequences:
            raise no_sequences_error(corpus.display_name, self.lost, max_seq_length)

    def sequence(self, index: int) -> list[Piece]:
        """The pieces of one sequence."""
        pieces, tokens, trained = self.packing.pieces, self.corpus.entry.tokens, self.corpus.entry.trained
        sequence = []
        for piece in self.packing.sequence(index).tolist():
            document = int(pieces.document_P[piece])
            start = int(self.corpus.starts_N[document]) + int(pieces.start_P[piece])
            end = start + int(pieces.length_P[piece])
            mask = None if trained is None else trained[start:end]
            sequence.append(Piece(tokens[start:end], self.corpus.origin(document), mask))
        return sequence
