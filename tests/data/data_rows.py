"""Rows written to a file, and opened as a corpus."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trimtab.data import SourceSpec, open_corpus
from trimtab.data.corpus import Corpus
from trimtab.text.tokenizer import Tokenizer


def write(path: Path, rows: list[Any]) -> Path:
    """JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def opened(path: Path, tokenizer: Tokenizer, **spec: Any) -> Corpus:
    """The file as a corpus, with its cache beside it."""
    return open_corpus(SourceSpec(str(path), **spec), tokenizer, cache_dir=path.parent / "cache", num_proc=1)
