"""A corpus: the tokenized documents of one source, in a memory-mapped cache, with views of parts of it.

# N documents
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.data.cache import Entry, TokenCache, Writer, entry_key
from trimtab.data.detection import detect
from trimtab.data.fingerprints import (
    FileStamp,
    as_begun,
    check_manifest,
    check_unchanged,
    content_fingerprint,
    manifest,
    stamp_files,
)
from trimtab.data.formats import Format
from trimtab.data.heldout import heldout_mask
from trimtab.data.progress import Progress, ProgressCallback, silent
from trimtab.data.readers import SegmentReader
from trimtab.data.rendering import Rendering
from trimtab.data.sources import ResolvedSource, SourceSpec, resolve
from trimtab.data.spec import SEGMENT_CHARS, estimate_tokens, token_bytes
from trimtab.data.tokenizer_pool import default_num_proc
from trimtab.data.tokenizing import TokenizerLike, TokenizerSpec, tokenize
from trimtab.facts.errors import DataError


@dataclass(frozen=True)
class Summary:
    """What a corpus holds and what was left out of it."""

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
    calls of tools that the chat template does not write."""
    bad: int = 0
    """Rows that are no example or that the chat template refuses, left out where `bad_rows: skip` says so."""
    complaint: str = ""
    """About the first of them."""
    unanswered: int = 0
    """Conversations whose last messages no answer follows; these messages were left out."""
    rewritten: int = 0
    """Conversations whose earlier turns the chat template writes otherwise once an answer follows."""
    trained: int = 0
    """Tokens that are trained on; all of them where documents are texts."""
    files: int = 0
    ignored: tuple[str, ...] = ()
    """Files of a folder that are not text by their extension."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Corpus:
    """Documents of one source as tokens; views made by `split` and `without` share the same files.

    Example:
        >>> corpus = open_corpus(SourceSpec("books/"), tokenizer, cache_dir=Path("cache"))  # doctest: +SKIP
        >>> train, heldout = corpus.split(share=0.01)  # doctest: +SKIP
        >>> heldout.tokens(0)[:3], heldout.origin(0)  # doctest: +SKIP
        (array([ 17, 512,   9], dtype=uint16), 'emma.txt:1')
    """

    name: str
    fingerprint: str
    """Digest of the content and of what this view takes of it."""
    summary: Summary
    entry: Entry
    starts_N: np.ndarray
    lengths_N: np.ndarray
    records_N: np.ndarray
    stamps: tuple[FileStamp, ...]
    content: str
    tokenizer: TokenizerSpec
    form: Format | None = None
    """How rows became examples; None where they are texts."""
    source: ResolvedSource | None = None
    """The files it was read from."""
    streaming: bool = False
    label: str = ""
    """What messages call it, unless that is its name."""

    @property
    def shown(self) -> str:
        """What messages call it."""
        return self.label or self.name

    @property
    def num_documents(self) -> int:
        """Of this view."""
        return len(self.lengths_N)

    @property
    def num_tokens(self) -> int:
        """Of this view, beginning and end tokens included."""
        return int(self.lengths_N.sum())

    def tokens(self, document: int) -> np.ndarray:
        """Ids [length] of one document, not copied."""
        start = int(self.starts_N[document])
        return self.entry.tokens[start : start + int(self.lengths_N[document])]

    def trained(self, document: int) -> np.ndarray | None:
        """uint8 [length], 1 where a token of one document is trained on; None where all are."""
        if self.entry.trained is None:
            return None
        start = int(self.starts_N[document])
        return self.entry.trained[start : start + int(self.lengths_N[document])]

    @property
    def masked(self) -> bool:
        """Whether documents are examples, of which not everything is trained on."""
        return self.entry.trained is not None

    def targets_N(self, max_seq_length: int) -> np.ndarray:
        """int64 [N]: tokens of each document's first `max_seq_length` that are trained on, its first one excepted.

        (Nothing predicts a first token.)
        """
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

    def split(self, *, share: float | None = None, count: int | None = None) -> tuple[Corpus, Corpus]:
        """(train, heldout): by content hash, so that no document is on both sides.

        A corpus of one distinct document is cut instead: its last tokens are held out.
        """
        if self.num_documents == 1 or len(np.unique(self.records_N["hash"])) == 1:
            if self.masked:
                raise DataError(
                    f"{self.shown} is {self._copies}one example, of which no part can be held out",
                    "give more, name a set under data.eval.domain, or set data.eval_share: 0",
                )
            return self._split_tail(share if share is not None else 0.1)
        mask_N = heldout_mask(self.records_N["hash"], share, count)
        what = f"share {share}" if share is not None else f"count {count}"
        return self._view(~mask_N, f"train {what}"), self._view(mask_N, f"heldout {what}")

    def without(self, other: Corpus) -> Corpus:
        """This corpus less every document that `other` (an evaluation set, say) has too."""
        mask_N = ~np.isin(self.records_N["hash"], other.records_N["hash"])
        if mask_N.all():
            return self
        if not mask_N.any():
            raise DataError(
                f"every document of {self.shown} is also in {other.shown}",
                "name other text under data.eval, or take it out of data.train",
            )
        return self._view(mask_N, f"without {other.fingerprint}")

    def manifest(self) -> dict[str, Any]:
        """Plain data for a run folder, to know the data again; see `check`."""
        return manifest(self.name, self.content, self.stamps)

    def check(self, kept: dict[str, Any]) -> None:
        """A DataError that names the files which are not as they were when `kept` was made."""
        check_manifest(kept, self.manifest())

    def _view(self, mask_N: np.ndarray, what: str) -> Corpus:
        return self._replace(self.starts_N[mask_N], self.lengths_N[mask_N], self.records_N[mask_N], what)

    def _split_tail(self, share: float) -> tuple[Corpus, Corpus]:
        kept_N = (self.lengths_N[:1] * (1 - share)).astype(np.int64)
        rest_N = self.lengths_N[:1] - kept_N
        if kept_N[0] < 2 or rest_N[0] < 2:
            raise DataError(
                f"{self.shown} is {self._copies}one document of {self.lengths_N[0]} tokens, too short to hold a part "
                "out",
                "give more text, name a set under data.eval.domain, or set data.eval_share: 0",
            )
        start_N, record_N = self.starts_N[:1], self.records_N[:1]
        return (
            self._replace(start_N, kept_N, record_N, f"head {share}"),
            self._replace(start_N + kept_N, rest_N, record_N, f"tail {share}"),
        )

    @property
    def _copies(self) -> str:
        """How often a corpus of one distinct document has it, for messages."""
        return f"{self.num_documents} copies of " if self.num_documents > 1 else ""

    def _replace(
        self, starts_N: np.ndarray, lengths_N: np.ndarray, records_N: np.ndarray, what: str
    ) -> Corpus:
        summary = dataclasses.replace(self.summary, documents=len(lengths_N), tokens=int(lengths_N.sum()))
        return dataclasses.replace(
            self,
            fingerprint=f"{self.fingerprint} {what}",
            summary=summary,
            starts_N=starts_N,
            lengths_N=lengths_N,
            records_N=records_N,
        )


def default_cache_dir() -> Path:
    """Where tokens are kept when nobody says otherwise."""
    return Path.home() / ".cache" / "trimtab" / "tokens"


def open_cached(
    spec: SourceSpec,
    tokenizer: TokenizerLike | TokenizerSpec,
    *,
    cache_dir: Path | None = None,
    num_proc: int | None = None,
    progress: ProgressCallback = silent,
) -> Corpus:
    """Tokenizes a source, or finds it in the cache; see `trimtab.data.open_corpus`."""
    frame = tokenizer if isinstance(tokenizer, TokenizerSpec) else TokenizerSpec.of(tokenizer)
    source = resolve(spec)
    cache = TokenCache(
        (cache_dir or default_cache_dir()).expanduser(),
        lambda text: progress(Progress("message", spec.name, message=text)),
    )
    source = as_begun(source, cache.digests, progress=progress)
    source = dataclasses.replace(source, form=detect(source))
    rendering = Rendering.of(source, frame.chat)
    stamps = stamp_files(source, cache.digests, progress=progress)
    content = content_fingerprint(source, stamps)
    key = entry_key(
        content,
        frame.fingerprint,
        [list(frame.prefix), list(frame.suffix)],
        [frame.vocab_size, SEGMENT_CHARS, *([rendering.digest] if rendering else [])],
    )
    width, processes = token_bytes(frame.vocab_size), num_proc or default_num_proc()
    entry = cache.get_or_build(
        key,
        lambda writer: _build(source, stamps, frame, rendering, writer, processes, progress),
        dtype=f"uint{8 * width}",
        need_bytes=estimate_tokens(sum(stamp.size for stamp in stamps)) * (width + (rendering is not None)),
        masked=rendering is not None,
    )
    ends_N = np.ascontiguousarray(entry.records["end"])
    starts_N = np.concatenate([np.zeros(1, np.int64), ends_N[:-1]])
    skipped = entry.meta["skipped"]
    summary = Summary(
        documents=len(ends_N),
        tokens=len(entry.tokens),
        files=len(source.files),
        ignored=source.ignored,
        **{"trained": len(entry.tokens), **skipped},
    )
    return Corpus(
        name=spec.name,
        fingerprint=content,
        summary=summary,
        entry=entry,
        starts_N=starts_N,
        lengths_N=ends_N - starts_N,
        records_N=entry.records,
        stamps=tuple(stamps),
        content=content,
        tokenizer=frame,
        form=source.form,
        label=spec.label or "",
        source=source,
    )


def _build(
    source: ResolvedSource,
    stamps: list[FileStamp],
    frame: TokenizerSpec,
    rendering: Rendering | None,
    writer: Writer,
    num_proc: int,
    progress: ProgressCallback,
) -> dict[str, Any]:
    reader = SegmentReader(source, template=frame.chat is not None)
    skipped = {"empty": 0, "short": 0, "repaired": 0}
    if rendering is not None:
        skipped |= {"bad": 0, "untrained": 0, "unanswered": 0, "rewritten": 0, "trained": 0}
    complaint = ""
    told = content_hash = 0
    for segment in tokenize(reader, frame, num_proc, rendering):
        if segment.first:
            content_hash = segment.hash
        why = segment.unusable
        if why is not None:
            skipped[why] += 1
            complaint = complaint or segment.complaint or ""
        else:
            writer.append_tokens(segment.ids, segment.trained)
            if segment.trained is not None:
                skipped["trained"] += int(np.count_nonzero(segment.trained))
            if segment.last:
                writer.end_document(segment.file, segment.row, content_hash)
                skipped["repaired"] += segment.repaired
                for what in ("unanswered", "rewritten"):
                    if getattr(segment, what):
                        skipped[what] += 1
        if writer.num_tokens - told > 1 << 17:
            told = writer.num_tokens
            progress(
                Progress(
                    "tokenize",
                    source.spec.name,
                    reader.done_bytes,
                    reader.total_bytes,
                    writer.num_documents,
                    writer.num_tokens,
                )
            )
    check_unchanged(source, stamps)
    if writer.num_documents == 0:
        raise nothing_left(source.spec.shown, skipped, complaint)
    total = reader.total_bytes
    progress(Progress("tokenize", source.spec.name, total, total, writer.num_documents, writer.num_tokens))
    return {"skipped": {**skipped, **({"complaint": complaint} if complaint else {})}}


LEFT_OUT = {
    "empty": "empty",
    "short": "shorter than two tokens",
    "untrained": "without a token to train on (no answer, or one of which the chat template writes nothing)",
    "bad": "unusable as examples, or refused by the chat template",
}
"""Why documents are left out, in words."""


def left_out(count: int, why: str) -> str:
    """Why so many documents are not there, as a sentence.

    Example:
        >>> left_out(2, "empty")
        '2 documents are empty and were left out'
    """
    what, are, were = ("document", "is", "was") if count == 1 else ("documents", "are", "were")
    return f"{count} {what} {are} {LEFT_OUT[why]} and {were} left out"


def nothing_left(name: str, skipped: Mapping[str, int], complaint: str = "") -> DataError:
    """The complaint about a source without a single usable document."""
    counted = [f"{skipped[why]} {words}" for why, words in LEFT_OUT.items() if skipped.get(why)]
    why = f": {' and '.join(counted)} were skipped" if counted else ""
    if complaint:
        return DataError(
            f"{name} holds nothing that can be used{why}", f"repair the rows; the first: {complaint}"
        )
    if skipped.get("untrained"):
        return DataError(
            f"{name} holds nothing to train on{why}",
            "give conversations with answers, or set train_on: all to train on everything",
        )
    return DataError(f"{name} holds no documents{why}", "give a source with text in it")
