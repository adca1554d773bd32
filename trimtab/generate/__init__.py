"""Text generation: KV cache, sampling, stop strings, streaming.

from trimtab.generate import SamplingOptions, generate

completion = generate(decoder, tokenizer, "The derivative of x² is", SamplingOptions(max_new_tokens=32), stream=print)
completion.text, completion.finish_reason, completion.tokens_per_second
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.facts.lazy import lazy_attributes

if TYPE_CHECKING:
    from trimtab.generate.cache import KVCache, PromptCache
    from trimtab.generate.completion import Completion
    from trimtab.generate.loop import generate, generate_many
    from trimtab.generate.options import SamplingKeywords, SamplingOptions
    from trimtab.generate.stopping import StopStrings

_MODULES = {
    "Completion": "completion",
    "KVCache": "cache",
    "PromptCache": "cache",
    "SamplingKeywords": "options",
    "SamplingOptions": "options",
    "StopStrings": "stopping",
    "generate": "loop",
    "generate_many": "loop",
}

__all__ = [
    "Completion",
    "KVCache",
    "PromptCache",
    "SamplingKeywords",
    "SamplingOptions",
    "StopStrings",
    "generate",
    "generate_many",
]

__getattr__ = lazy_attributes(__name__, _MODULES)
