"""Tokenizers and chat templates. Imports no torch.

from trimtab import text

tokenizer = text.load("models/SmolLM2-135M")       # a Hugging Face folder, or a .gguf file
ids = tokenizer.encode_document("Two and two make four.")
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.facts.lazy import lazy_attributes

if TYPE_CHECKING:
    from trimtab.text.chat import Limits, render_chats
    from trimtab.text.source import load
    from trimtab.text.streaming import Detokenizer
    from trimtab.text.template import read_template
    from trimtab.text.tokenizer import Tokenizer, check_vocabulary

_MODULES = {
    "Detokenizer": "streaming",
    "Limits": "chat",
    "Tokenizer": "tokenizer",
    "check_vocabulary": "tokenizer",
    "load": "source",
    "read_template": "template",
    "render_chats": "chat",
}

__all__ = ["Detokenizer", "Limits", "Tokenizer", "check_vocabulary", "load", "read_template", "render_chats"]

__getattr__ = lazy_attributes(__name__, _MODULES)
