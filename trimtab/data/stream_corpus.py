"""A source that is read and tokenized while training, with nothing kept on disk."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from trimtab.data.corpus import Corpus, Summary
from trimtab.data.detection import detect
from trimtab.data.fingerprints import (
    FileStamp,
    as_begun,
    check_manifest,
    content_fingerprint,
    manifest,
    stamp_files,
)
from trimtab.data.formats import Format
from trimtab.data.heldout import is_heldout, threshold
from trimtab.data.progress import ProgressCallback, silent
from trimtab.data.rendering import Rendering
from trimtab.data.sources import ResolvedSource, SourceSpec, resolve
from trimtab.data.tokenizer_pool import default_num_proc
from trimtab.data.tokenizing import TokenizerLike, TokenizerSpec
from trimtab.facts.errors import DataError


@dataclass(frozen=True)
class StreamCorpus:
    """A source that is read as it is trained on; `side` is the held-out part, the rest, or everything."""

    name: str
    fingerprint: str
    source: ResolvedSource
    stamps: tuple[FileStamp, ...]
    content: str
    tokenizer: TokenizerSpec
    num_proc: int
    share: float | None = None
    side: str = "all"
    excluded: frozenset[int] = field(default=frozenset(), repr=False)
    streaming: bool = True
    rendering: Rendering | None = None
    progress: ProgressCallback = field(default=silent, repr=False)

    @property
    def shown(self) -> str:
        """What messages call it."""
        return self.source.spec.shown

    @property
    def form(self) -> Format | None:
        """How rows become examples; None where they are texts."""
        return self.source.form

    @property
    def summary(self) -> Summary:
        """Counts are not known before everything has been read: zero documents and tokens stand for that."""
        return Summary(0, 0, files=len(self.source.files), ignored=self.source.ignored)

    @property
    def total_bytes(self) -> int:
        """Of all files together, as they lie on disk."""
        return sum(stamp.size for stamp in self.stamps)

    def split(
        self, *, share: float | None = None, count: int | None = None
    ) -> tuple[StreamCorpus, StreamCorpus]:
        """(train, heldout) by content hash, as in the cached mode; a count would need all hashes first."""
        if share is None:
            raise DataError(
                "a number of held-out documents needs the cached mode",
                "give a share, or set streaming: false",
            )
        threshold(share)
        return (
            dataclasses.replace(
                self, share=share, side="train", fingerprint=f"{self.fingerprint} train share {share}"
            ),
            dataclasses.replace(
                self, share=share, side="heldout", fingerprint=f"{self.fingerprint} heldout share {share}"
            ),
        )

    def without(self, other: Corpus) -> StreamCorpus:
        """This source less every document that `other` (a cached evaluation set) has too."""
        return dataclasses.replace(
            self,
            excluded=self.excluded | frozenset(other.records_N["hash"].tolist()),
            fingerprint=f"{self.fingerprint} without {other.fingerprint}",
        )

    def manifest(self) -> dict[str, Any]:
        """Plain data for a run folder, to know the data again; digests are of samples of each file."""
        return manifest(self.name, self.content, self.stamps)

    def check(self, kept: dict[str, Any]) -> None:
        """A DataError that names the files which are not as they were when `kept` was made."""
        check_manifest(kept, self.manifest())

    def takes(self, content_hash: int) -> bool:
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
    frame = tokenizer if isinstance(tokenizer, TokenizerSpec) else TokenizerSpec.of(tokenizer)
    source = as_begun(resolve(spec), None, sampled=True, progress=progress)
    source = dataclasses.replace(source, form=detect(source))
    rendering = Rendering.of(source, frame.chat)
    stamps = stamp_files(source, None, sampled=True, progress=progress)
    content = content_fingerprint(source, stamps)
    return StreamCorpus(
        name=spec.name,
        fingerprint=content,
        source=source,
        stamps=tuple(stamps),
        content=content,
        tokenizer=frame,
        num_proc=num_proc or default_num_proc(),
        rendering=rendering,
        progress=progress,
    )
