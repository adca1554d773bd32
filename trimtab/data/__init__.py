"""Sources → documents → tokens → packed windows → batches, deterministic and restorable.

`open_corpus` and `make_loader` are the doors. Names are resolved when they are used, so that
`trimtab.data.spec` and the cache work without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.facts.lazy import lazily

if TYPE_CHECKING:
    from trimtab.data.assembly import make_loader, open_corpus
    from trimtab.data.batch import Batch, collate
    from trimtab.data.corpus import Corpus, Summary
    from trimtab.data.evaluation import EvalBatches, eval_batches
    from trimtab.data.highlight import highlighted
    from trimtab.data.loader import Loader
    from trimtab.data.packing import pack_documents
    from trimtab.data.progress import Progress
    from trimtab.data.sources import SourceSpec, keep_rows, keep_texts
    from trimtab.data.stream_corpus import StreamCorpus
    from trimtab.data.stream_loader import StreamLoader
    from trimtab.data.tokenizing import TokenizerSpec

_MODULES = {
    "Batch": "batch",
    "Corpus": "corpus",
    "EvalBatches": "evaluation",
    "Loader": "loader",
    "Progress": "progress",
    "SourceSpec": "sources",
    "StreamCorpus": "stream_corpus",
    "StreamLoader": "stream_loader",
    "Summary": "corpus",
    "TokenizerSpec": "tokenizing",
    "collate": "batch",
    "eval_batches": "evaluation",
    "highlighted": "highlight",
    "keep_rows": "sources",
    "keep_texts": "sources",
    "make_loader": "assembly",
    "open_corpus": "assembly",
    "pack_documents": "packing",
}

__all__ = [
    "Batch",
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
    "highlighted",
    "keep_rows",
    "keep_texts",
    "make_loader",
    "open_corpus",
    "pack_documents",
]

__getattr__ = lazily(__name__, _MODULES)
