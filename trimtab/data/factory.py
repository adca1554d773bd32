"""Factories that open a source as a corpus and make a loader of corpora, cached or streamed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

from trimtab.data.cached_corpus import CachedCorpus
from trimtab.data.cached_loader import CachedLoader
from trimtab.data.caching import default_cache_dir, open_cached
from trimtab.data.in_memory import RowStream, spool_rows
from trimtab.data.interface import Corpus, Loader, ProgressCallback, silent
from trimtab.data.sampling import StepShape
from trimtab.data.sources import SourceSpec
from trimtab.data.stream_corpus import StreamCorpus, open_stream
from trimtab.data.stream_loader import StreamLoader
from trimtab.data.tokenizing import TokenizerLike, TokenizerSpec
from trimtab.facts.errors import DataError

Kind = TypeVar("Kind", bound=Corpus)
Weighted = Corpus | tuple[Corpus, float]


@overload
def open_corpus(
    source: SourceSpec | str | Any,
    tokenizer: TokenizerLike | TokenizerSpec,
    *,
    cache_dir: Path | None = ...,
    num_proc: int | None = ...,
    progress: ProgressCallback = ...,
    streaming: Literal[False] = ...,
) -> CachedCorpus: ...
@overload
def open_corpus(
    source: SourceSpec | str | Any,
    tokenizer: TokenizerLike | TokenizerSpec,
    *,
    cache_dir: Path | None = ...,
    num_proc: int | None = ...,
    progress: ProgressCallback = ...,
    streaming: bool,
) -> Corpus: ...
def open_corpus(
    source: SourceSpec | str | Any,
    tokenizer: TokenizerLike | TokenizerSpec,
    *,
    cache_dir: Path | None = None,
    num_proc: int | None = None,
    progress: ProgressCallback = silent,
    streaming: bool = False,
) -> Corpus:
    """Opens the documents of one source as tokens, from the cache if they are in it, otherwise tokenized on all
    cores. A source is the name of a file, folder or glob, a `SourceSpec`, or rows: a list or an iterator of
    texts, of conversations or of dicts (`data.in_memory`).

    All processes of a run may call it concurrently: one tokenizes, the others wait. `num_proc` is the number of
    tokenizing processes (default: the cores this process may use), `progress` is called with `Progress`
    reports. With `streaming` nothing is tokenized yet and nothing is written.

    Example:
        >>> corpus = open_corpus("books/", tokenizer, cache_dir=Path("cache"))      # doctest: +SKIP
        >>> corpus.summary.documents, corpus.summary.tokens                         # doctest: +SKIP
        (6, 1012345)
    """
    spec = _spec(source, cache_dir, streaming)
    if num_proc is not None and num_proc < 1:
        raise DataError(f"num_proc is {num_proc}", "give 1 or more, or leave it out to use all cores")
    if streaming:
        return open_stream(spec, tokenizer, num_proc=num_proc, progress=progress)
    return open_cached(spec, tokenizer, cache_dir=cache_dir, num_proc=num_proc, progress=progress)


def _spec(source: Any, cache_dir: Path | None, streaming: bool) -> SourceSpec:
    if isinstance(source, SourceSpec):
        return source
    if isinstance(source, str | Path):
        return SourceSpec(str(source))
    if streaming:
        stream = RowStream(source, label="rows")
        return SourceSpec(f"memory:{stream.name}", rows=stream, label="rows")
    spooled = spool_rows(source, (cache_dir or default_cache_dir()).expanduser() / "memory", label="rows")
    return SourceSpec(f"memory:{spooled.name}", files=(spooled.path,), label="rows")


def make_loader(
    train: Sequence[Weighted],
    *,
    max_seq_length: int,
    batch_size: int,
    accumulation: int = 1,
    packing: bool = True,
    replay: Sequence[Weighted] = (),
    replay_share: float = 0.0,
    seed: int = 0,
    dp_rank: int = 0,
    dp_size: int = 1,
    group_by_length: bool = False,
    train_source_first: bool = True,
) -> Loader:
    """Builds a loader over corpora, or (corpus, weight) pairs, all cached or all streamed.

    A train source of weight 1 is seen once per epoch, of weight 2 twice, of 0.5 half (the other half in
    the next epoch). `replay_share` of all sequences come from the `replay` corpora; their weights scale their
    sizes. Without `packing`, `group_by_length` puts documents of similar length into each microbatch and
    pads it to its own longest one. `train_source_first` puts a sequence of a train source into the first step if replay
    alone would fill it; False keeps the order of earlier versions.

    Example:
        >>> loader = make_loader([(math, 1.0)], replay=[general], replay_share=0.1,    # doctest: +SKIP
        ...                      max_seq_length=1024, batch_size=4, accumulation=4)
        >>> batches = loader.next_step()                                              # doctest: +SKIP
    """
    if not train:
        raise DataError("there is no source to train on", "name one under data.train")
    shape = StepShape(batch_size, accumulation, dp_rank, dp_size)
    pairs, others = [_pair(corpus) for corpus in train], [_pair(corpus) for corpus in replay]
    kinds = {corpus.streaming for corpus, _ in [*pairs, *others]}
    if len(kinds) > 1:
        raise DataError("some sources are streamed and some are cached", "open all of them in the same way")
    if group_by_length and packing:
        raise DataError("group_by_length is for documents that are not packed", "pass packing=False")
    if group_by_length and kinds == {True}:
        raise DataError("group_by_length needs the lengths of all documents", "open them without streaming")
    if kinds == {True}:
        return StreamLoader(
            _of_kind(StreamCorpus, pairs),
            _of_kind(StreamCorpus, others),
            replay_share=replay_share,
            max_seq_length=max_seq_length,
            packing=packing,
            shape=shape,
            seed=seed,
        )
    return CachedLoader(
        _of_kind(CachedCorpus, pairs),
        _of_kind(CachedCorpus, others),
        replay_share=replay_share,
        max_seq_length=max_seq_length,
        packing=packing,
        shape=shape,
        seed=seed,
        group_by_length=group_by_length,
        train_source_first=train_source_first,
    )


def _pair(corpus: Weighted) -> tuple[Corpus, float]:
    return corpus if isinstance(corpus, tuple) else (corpus, 1.0)


def _of_kind(kind: type[Kind], pairs: Sequence[tuple[Corpus, float]]) -> list[tuple[Kind, float]]:
    """The pairs, checked to be all of this kind."""
    return [(corpus, weight) for corpus, weight in pairs if isinstance(corpus, kind)]
