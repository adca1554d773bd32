"""Sources → documents → tokens → packed sequences → batches, deterministic and restorable.

`open_corpus` and `make_loader` are the public API; both return the types of `interface.py`, cached or streamed. Names
are imported lazily, so that `trimtab.data.spec` and the cache work without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.facts.lazy import lazy_attributes

if TYPE_CHECKING:
    from trimtab.data.batch import Batch, EvalBatches, collate, eval_batches
    from trimtab.data.cached_corpus import CachedCorpus
    from trimtab.data.cached_loader import CachedLoader
    from trimtab.data.factory import make_loader, open_corpus
    from trimtab.data.interface import Corpus, Loader, Progress, Summary
    from trimtab.data.packing import pack_documents
    from trimtab.data.preview import highlight_example
    from trimtab.data.sources import SourceSpec, write_rows, write_texts
    from trimtab.data.stream_corpus import StreamCorpus
    from trimtab.data.stream_loader import StreamLoader
    from trimtab.data.tokenizing import TokenizerSpec

_MODULES = {
    "Batch": "batch",
    "CachedCorpus": "cached_corpus",
    "CachedLoader": "cached_loader",
    "Corpus": "interface",
    "EvalBatches": "batch",
    "Loader": "interface",
    "Progress": "interface",
    "SourceSpec": "sources",
    "StreamCorpus": "stream_corpus",
    "StreamLoader": "stream_loader",
    "Summary": "interface",
    "TokenizerSpec": "tokenizing",
    "collate": "batch",
    "eval_batches": "batch",
    "highlight_example": "preview",
    "write_rows": "sources",
    "write_texts": "sources",
    "make_loader": "factory",
    "open_corpus": "factory",
    "pack_documents": "packing",
}

__all__ = [
    "Batch",
    "CachedCorpus",
    "CachedLoader",
    "Corpus",
    "EvalBatches",
    "Loader",
    "Progress",
    "SourceSpec",
    "StreamCorpus",
    "StreamLoader",
    "Summary",
    "TokenizerSpec",
    "collate",
    "eval_batches",
    "highlight_example",
    "make_loader",
    "open_corpus",
    "pack_documents",
    "write_rows",
    "write_texts",
]


_RENAMED = {"keep_rows": "write_rows", "keep_texts": "write_texts", "highlighted": "highlight_example"}

__getattr__ = lazy_attributes(__name__, _MODULES, _RENAMED)
