"""Tokenizers and chat templates: text to ids and back. Imports no torch.

from trimtab import text

tokenizer = text.load("models/SmolLM2-135M")       # a Hugging Face folder, or a .gguf file
ids = tokenizer.encode_document("Two and two make four.")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.text.chat import Limits, render_chats
    from trimtab.text.source import load
    from trimtab.text.streaming import Detokenizer
    from trimtab.text.template import read_template
    from trimtab.text.tokenizer import Tokenizer, check_fits

_NAMES = {
    "Detokenizer": "trimtab.text.streaming",
    "Limits": "trimtab.text.chat",
    "Tokenizer": "trimtab.text.tokenizer",
    "check_fits": "trimtab.text.tokenizer",
    "load": "trimtab.text.source",
    "read_template": "trimtab.text.template",
    "render_chats": "trimtab.text.chat",
}

__all__ = ["Detokenizer", "Limits", "Tokenizer", "check_fits", "load", "read_template", "render_chats"]


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    raise AttributeError(f"module 'trimtab.text' has no attribute {name!r}")
