"""A corpus: the tokenized documents of one source, in a memory-mapped cache, with views of parts of it.

# N documents
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.data.cache import Entry, TokenCache, Writer, entry_key
from trimtab.data.fingerprints import (
    FileStamp,
    check_manifest,
    check_unchanged,
    content_fingerprint,
    manifest,
    stamp_files,
)
from trimtab.data.heldout import heldout_mask
from trimtab.data.progress import Progress, ProgressCallback, silent
from trimtab.data.readers import SegmentReader
from trimtab.data.sources import ResolvedSource, SourceSpec, resolve
from trimtab.data.spec import SEGMENT_CHARS, estimate_tokens, token_bytes
from trimtab.data.tokenizing import TokenizerLike, TokenizerSpec, default_num_proc, tokenize
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
    streaming: bool = False

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

    def origin(self, document: int) -> str:
        """`file:row` of one document, for messages."""
        record = self.records_N[document]
        return f"{self.stamps[int(record['file'])].name}:{int(record['row'])}"

    def split(self, *, share: float | None = None, count: int | None = None) -> tuple[Corpus, Corpus]:
        """(train, heldout): by content hash, so that no document is on both sides.

        A corpus of one distinct document is cut instead: its last tokens are held out.
        """
        if self.num_documents == 1 or len(np.unique(self.records_N["hash"])) == 1:
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
                f"every document of {self.name} is also in {other.name}",
                "evaluate on text that is not trained on",
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
                f"{self.name} is one document of {self.num_tokens} tokens, too short to hold a part out",
                "give more text, or an evaluation set of its own",
            )
        start_N, record_N = self.starts_N[:1], self.records_N[:1]
        return (
            self._replace(start_N, kept_N, record_N, f"head {share}"),
            self._replace(start_N + kept_N, rest_N, record_N, f"tail {share}"),
        )

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
    stamps = stamp_files(source, cache.digests, progress=progress)
    content = content_fingerprint(source, stamps)
    key = entry_key(
        content,
        frame.fingerprint,
        [list(frame.prefix), list(frame.suffix)],
        [frame.vocab_size, SEGMENT_CHARS],
    )
    width = token_bytes(frame.vocab_size)
    entry = cache.get_or_build(
        key,
        lambda writer: _build(source, stamps, frame, writer, num_proc or default_num_proc(), progress),
        dtype=f"uint{8 * width}",
        need_bytes=estimate_tokens(sum(stamp.size for stamp in stamps)) * width,
    )
    ends_N = np.ascontiguousarray(entry.records["end"])
    starts_N = np.concatenate([np.zeros(1, np.int64), ends_N[:-1]])
    skipped = entry.meta["skipped"]
    summary = Summary(
        documents=len(ends_N),
        tokens=len(entry.tokens),
        files=len(source.files),
        ignored=source.ignored,
        **skipped,
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
    )


def _build(
    source: ResolvedSource,
    stamps: list[FileStamp],
    frame: TokenizerSpec,
    writer: Writer,
    num_proc: int,
    progress: ProgressCallback,
) -> dict[str, Any]:
    reader = SegmentReader(source)
    skipped = {"empty": 0, "short": 0, "repaired": 0}
    told = content_hash = 0
    for segment in tokenize(reader, frame, num_proc):
        if segment.first:
            content_hash = segment.hash
        if segment.empty:
            skipped["empty"] += 1
        elif segment.first and segment.last and len(segment.ids) < 2:
            skipped["short"] += 1
        else:
            writer.append_tokens(segment.ids)
            if segment.last:
                writer.end_document(segment.file, segment.row, content_hash)
                skipped["repaired"] += segment.repaired
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
        raise nothing_left(source.spec.name, skipped["empty"], skipped["short"])
    total = reader.total_bytes
    progress(Progress("tokenize", source.spec.name, total, total, writer.num_documents, writer.num_tokens))
    return {"skipped": skipped}


def nothing_left(name: str, empty: int, short: int) -> DataError:
    """The complaint about a source without a single usable document."""
    why = f": {empty} empty and {short} shorter than two tokens were skipped" if empty or short else ""
    return DataError(f"{name} holds no documents{why}", "give a source with text in it")
