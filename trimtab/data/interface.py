"""Interfaces of corpora and loaders, cached or streamed, and progress reports.

A `Corpus` is the documents of one source, a `Loader` the batches of a run. Each has two implementations, over the token
cache (`cached_corpus`, `cached_loader`) and over sources that are read while training (`stream_corpus`,
`stream_loader`). Callers use both in the same way; values that a stream does not know yet are None.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from trimtab.data.resume_checks import CorpusManifest

if TYPE_CHECKING:
    from trimtab.data.batch import Batch
    from trimtab.data.cached_corpus import CachedCorpus
    from trimtab.data.fingerprints import FileStamp
    from trimtab.data.formats import Format
    from trimtab.data.packing import Piece
    from trimtab.data.sampling import StepShape
    from trimtab.data.sources import ResolvedSource
    from trimtab.data.tokenizing import TokenizerSpec


@dataclass(frozen=True)
class Progress:
    """One progress report: the stage, how far it is, and an optional message."""

    stage: Literal["hash", "tokenize", "verify", "message"]
    source: str
    done_bytes: int = 0
    total_bytes: int = 0
    documents: int = 0
    tokens: int = 0
    message: str | None = None


ProgressCallback = Callable[[Progress], None]


def silent(progress: Progress) -> None:
    """Ignores progress reports."""


@dataclass(frozen=True)
class Summary:
    """Counts of a corpus's documents and tokens, and of what was left out."""

    documents: int
    tokens: int
    empty: int = 0
    """Documents without any text, skipped."""
    short: int = 0
    """Documents of fewer than two tokens, skipped: they have nothing to predict."""
    repaired: int = 0
    """Documents with broken Unicode escapes, which became U+FFFD."""
    untrained: int = 0
    """Examples without a single token to train on, left out: conversations without an answer, empty completions,
    tool calls that the chat template omits."""
    bad: int = 0
    """Rows that are not valid examples or that the chat template rejects, left out with `bad_rows: skip`."""
    first_error: str = ""
    """The error of the first bad row."""
    unanswered: int = 0
    """Conversations that end with messages without an answer; these messages were left out."""
    rewritten: int = 0
    """Conversations whose earlier turns the chat template renders differently once an answer follows."""
    trained: int = 0
    """Tokens that are trained on; all tokens of plain text."""
    files: int = 0
    ignored: tuple[str, ...] = ()
    """Files of a folder whose extension is not supported."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Sequences:
    """Packed sequences: their count, and the pieces of each by index."""

    count: int
    get: Callable[[int], list[Piece]]


@dataclass(frozen=True, kw_only=True)
class Corpus(ABC):
    """Documents of one source as tokens; `split` and `without` return views of parts of it."""

    name: str
    fingerprint: str
    """Digest of the content and of the view of it (split, excluded documents)."""
    summary: Summary
    """The counts of a stream are unknown until everything has been read; documents and tokens are then 0."""
    source: ResolvedSource
    """The files it is read from."""
    stamps: tuple[FileStamp, ...]
    content: str
    """Digest of the content of all files and of the settings that they are read with."""
    tokenizer: TokenizerSpec
    streaming: ClassVar[bool]

    @property
    def display_name(self) -> str:
        """The name in messages."""
        return self.source.spec.display_name

    @property
    def form(self) -> Format | None:
        """The format of rows that are examples; None for plain text."""
        return self.source.form

    @abstractmethod
    def split(self, *, share: float | None = None, count: int | None = None) -> tuple[Self, Self]:
        """(train, heldout): by content hash, so that no document is on both sides."""

    @abstractmethod
    def without(self, other: CachedCorpus) -> Self:
        """This corpus without the documents that are also in `other` (such as a cached evaluation set)."""

    @abstractmethod
    def eval_sequences(self, max_seq_length: int, *, packing: bool, max_sequences: int | None) -> Sequences:
        """Returns the sequences for evaluation, the same every time: all, or `max_sequences` of them."""

    @abstractmethod
    def piece(self, number: int, max_seq_length: int) -> tuple[Piece, bool]:
        """Returns the trained piece with this index, and whether its document continues after it."""

    def manifest(self) -> dict[str, Any]:
        """Plain data for a run folder, to recognize the data on resume; see `check`."""
        return self._manifest.to_dict()

    def check(self, saved: Mapping[str, Any]) -> None:
        """Raises a DataError that names the files that changed since the manifest was made."""
        CorpusManifest.from_dict(saved).check(self._manifest)

    @property
    def _manifest(self) -> CorpusManifest:
        return CorpusManifest.of(self.name, self.content, self.stamps)


@dataclass(frozen=True)
class LoaderFacts:
    """The size of an epoch; None if it is unknown until everything has been read."""

    num_sequences: int | None
    num_tokens: int | None
    fill: float | None
    attended_share: float | None = None
    """The share of causal query–key pairs that are within one document."""


class Loader(ABC):
    """Batches of endless epochs, deterministic and restorable at every step.

    Created by `trimtab.data.make_loader`.

    Example:
        >>> loader = make_loader([corpus], max_seq_length=512, batch_size=4, accumulation=4)  # doctest: +SKIP
        >>> for _ in range(loader.steps_per_epoch):  # doctest: +SKIP
        ...     train(loader.next_step())
    """

    max_seq_length: int
    shape: StepShape

    @property
    @abstractmethod
    def num_sequences(self) -> int | None:
        """Sequences of one epoch, over all ranks, replay included."""

    @property
    @abstractmethod
    def num_tokens(self) -> int | None:
        """Approximate tokens per epoch."""

    @property
    @abstractmethod
    def steps_per_epoch(self) -> int | None:
        """Steps of one epoch, the last of which may be smaller."""

    @property
    @abstractmethod
    def dropped_tokens(self) -> int | None:
        """Tokens that are in no sequence: ends of long documents when packing is off, otherwise none."""

    @property
    @abstractmethod
    def fill(self) -> float:
        """The share of non-padding positions in microbatches."""

    @property
    @abstractmethod
    def facts(self) -> LoaderFacts:
        """The size of an epoch, for the planner."""

    @property
    @abstractmethod
    def epoch(self) -> float:
        """Epochs completed: 1.5 is the middle of the second."""

    @abstractmethod
    def notes(self) -> list[str]:
        """Sentences about what is truncated or left out at this length, one per source."""

    @abstractmethod
    def next_step(self) -> list[Batch]:
        """The microbatches of this rank for the next step; the last one of an epoch may be smaller."""

    @abstractmethod
    def position(self) -> dict[str, Any]:
        """Where the next step begins, as JSON; `restore` continues there exactly."""

    @abstractmethod
    def restore(self, position: dict[str, Any]) -> None:
        """Continues at a position. Raises CheckpointError or DataError if settings or data changed."""

    @abstractmethod
    def close(self) -> None:
        """Stops prefetching threads and processes; idempotent."""
