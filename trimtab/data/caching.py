"""Opens a source through the token cache, tokenizing it if necessary."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np

from trimtab.data.cache import CacheEntry, TokenCache, Writer, entry_key
from trimtab.data.cached_corpus import CachedCorpus
from trimtab.data.detection import detect
from trimtab.data.fingerprints import FileStamp, as_resumed, check_unchanged, content_fingerprint, stamp_files
from trimtab.data.interface import Progress, ProgressCallback, Summary, silent
from trimtab.data.readers import SegmentReader
from trimtab.data.rendering import Rendering
from trimtab.data.selection import SourceCounts, no_documents_error
from trimtab.data.sources import ResolvedSource, SourceSpec, resolve
from trimtab.data.spec import SEGMENT_CHARS, estimate_tokens, token_bytes
from trimtab.data.tokenizer_pool import default_num_proc
from trimtab.data.tokenizing import TokenizerLike, TokenizerSpec, tokenize


def default_cache_dir() -> Path:
    """The default folder of the token cache."""
    return Path.home() / ".cache" / "trimtab" / "tokens"


def open_cached(
    spec: SourceSpec,
    tokenizer: TokenizerLike | TokenizerSpec,
    *,
    cache_dir: Path | None = None,
    num_proc: int | None = None,
    progress: ProgressCallback = silent,
) -> CachedCorpus:
    """Opens a source from the cache, tokenizing it if necessary; see `trimtab.data.open_corpus`."""
    tokenizer_spec = tokenizer if isinstance(tokenizer, TokenizerSpec) else TokenizerSpec.of(tokenizer)
    source = resolve(spec)
    cache = TokenCache(
        (cache_dir or default_cache_dir()).expanduser(),
        lambda text: progress(Progress("message", spec.name, message=text)),
    )
    source = as_resumed(source, cache.digests, progress=progress)
    source = dataclasses.replace(source, form=detect(source))
    rendering = Rendering.of(source, tokenizer_spec.chat)
    stamps = stamp_files(source, cache.digests, progress=progress)
    content = content_fingerprint(source, stamps)
    key = entry_key(
        content,
        tokenizer_spec.fingerprint,
        [list(tokenizer_spec.prefix), list(tokenizer_spec.suffix)],
        [tokenizer_spec.vocab_size, SEGMENT_CHARS, *([rendering.digest] if rendering else [])],
    )
    width, processes = token_bytes(tokenizer_spec.vocab_size), num_proc or default_num_proc()
    entry = cache.get_or_build(
        key,
        lambda writer: _build(source, stamps, tokenizer_spec, rendering, writer, processes, progress),
        dtype=f"uint{8 * width}",
        need_bytes=estimate_tokens(sum(stamp.size for stamp in stamps)) * (width + (rendering is not None)),
        masked=rendering is not None,
    )
    ends_N = np.ascontiguousarray(entry.records["end"])
    starts_N = np.concatenate([np.zeros(1, np.int64), ends_N[:-1]])
    return CachedCorpus(
        name=spec.name,
        fingerprint=content,
        summary=_summary(entry, source),
        entry=entry,
        starts_N=starts_N,
        lengths_N=ends_N - starts_N,
        records_N=entry.records,
        stamps=tuple(stamps),
        content=content,
        tokenizer=tokenizer_spec,
        source=source,
    )


def _summary(entry: CacheEntry, source: ResolvedSource) -> Summary:
    counts = entry.meta.counts
    return Summary(
        documents=len(entry.records),
        tokens=len(entry.tokens),
        empty=counts.empty,
        short=counts.short,
        repaired=counts.repaired,
        untrained=counts.untrained,
        bad=counts.bad,
        first_error=counts.first_error,
        unanswered=counts.unanswered,
        rewritten=counts.rewritten,
        trained=len(entry.tokens) if counts.trained is None else counts.trained,
        files=len(source.files),
        ignored=source.ignored,
    )


def _build(
    source: ResolvedSource,
    stamps: list[FileStamp],
    tokenizer_spec: TokenizerSpec,
    rendering: Rendering | None,
    writer: Writer,
    num_proc: int,
    progress: ProgressCallback,
) -> SourceCounts:
    reader = SegmentReader(source, template=tokenizer_spec.chat is not None)
    counter: Counter[str] = Counter()
    first_error = ""
    reported_tokens = content_hash = 0
    for segment in tokenize(reader, tokenizer_spec, num_proc, rendering):
        if segment.first:
            content_hash = segment.hash
        why = segment.unusable
        if why is not None:
            counter[why] += 1
            first_error = first_error or segment.row_error or ""
        else:
            writer.append_tokens(segment.ids, segment.trained)
            if segment.trained is not None:
                counter["trained"] += int(np.count_nonzero(segment.trained))
            if segment.last:
                writer.end_document(segment.file, segment.row, content_hash)
                counter["repaired"] += segment.repaired
                for what in ("unanswered", "rewritten"):
                    if getattr(segment, what):
                        counter[what] += 1
        if writer.num_tokens - reported_tokens > 1 << 17:
            reported_tokens = writer.num_tokens
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
    trained = counter.pop("trained", 0) if rendering is not None else None
    counts = SourceCounts(**counter, trained=trained, first_error=first_error)
    if writer.num_documents == 0:
        raise no_documents_error(source.spec.display_name, counts)
    total = reader.total_bytes
    progress(Progress("tokenize", source.spec.name, total, total, writer.num_documents, writer.num_tokens))
    return counts
