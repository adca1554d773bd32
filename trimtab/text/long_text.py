"""Splits long texts where splitting changes no token, to bound the memory of tokenization.

The tokenizers library needs about 180 bytes per character: 9 GB for a document of 50 MB. Pieces of a text yield the
same tokens if (1) the pre-tokenizer splits at that position anyway, (2) no rule looks across it. Both are checked at
each position on the surrounding text. If no such position is found, or for other kinds of tokenizers, the text is not
split.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import tokenizers

PIECE_CHARS = 1 << 16
_WINDOW = 256
_TRIES = 64
"""Positions that are tried before a text is left unsplit."""
_SPACE = "▁"
# Before " word", or between a line's end and a letter; both after a character that is no space.
_BORDER = re.compile(r"(?<=\S)(?= [A-Za-z])|(?<=\S\n)(?=[A-Za-z])")
_WORD_BORDER = re.compile(r"(?<=\S)(?= [A-Za-z])")


class LongText:
    """Splits long texts for one tokenizer.

    Example:
        >>> cutter = LongText(tokenizer.backend)                           # doctest: +SKIP
        >>> [backend for backend, piece in cutter.pieces("short")]         # doctest: +SKIP
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.first = self.later = backend
        self._border: re.Pattern[str] | None = None
        added = backend.get_added_tokens_decoder().values()
        self._added = [t.content for t in added]
        if any(t.lstrip or t.rstrip or t.single_word or not _cannot_span_cut(t.content) for t in added):
            return  # an added token could reach across a cut
        pipeline = json.loads(backend.to_str())
        pipeline.update(padding=None, truncation=None)
        normalizer, pre_tokenizer = pipeline["normalizer"], pipeline["pre_tokenizer"]
        if _drop_space_prefix(pipeline):
            # SentencePiece: no token contains a space after a letter; later pieces begin with their own space.
            if _spaces_only_lead(pipeline["model"]["vocab"]):
                self._border = _WORD_BORDER
                self.later = tokenizers.Tokenizer.from_str(json.dumps(pipeline))
        elif pre_tokenizer is not None and (normalizer is None or normalizer["type"] in ("NFC", "NFKC")):
            self._border = _BORDER

    def pieces(self, text: str) -> Iterator[tuple[tokenizers.Tokenizer, str]]:
        """Yield (pipeline, piece); the tokens of all pieces, in order, are the tokens of the text."""
        start, backend = 0, self.first
        if self._border is _WORD_BORDER and any(token in text for token in self._added):
            yield backend, text  # only `first` adds the space after an added token
            return
        while (end := self._next_cut(text, start)) < len(text):
            yield backend, text[start:end]
            start, backend = end, self.later
        yield backend, text[start:]

    def _next_cut(self, text: str, start: int) -> int:
        at = start + PIECE_CHARS
        if self._border is not None and at < len(text):
            for found in itertools.islice(self._border.finditer(text, at), _TRIES):
                if self._keeps_tokens(text, found.start()):
                    return found.start()
        return len(text)

    def _keeps_tokens(self, text: str, at: int) -> bool:
        if self._border is _WORD_BORDER:
            return True  # SentencePiece: checked on its vocabulary
        cutter = self.first.pre_tokenizer
        before, after = text[max(0, at - _WINDOW) : at], text[at : at + _WINDOW]
        whole = [word for word, _ in cutter.pre_tokenize_str(before + after)]
        apart = [word for part in (before, after) for word, _ in cutter.pre_tokenize_str(part)]
        return whole == apart


def _cannot_span_cut(content: str) -> bool:
    """Whether an added token can neither begin at a split position nor contain one."""
    return bool(content) and not content[0].isalnum() and not any(c.isspace() for c in content)


def _drop_space_prefix(pipeline: dict[str, Any]) -> bool:
    """Remove the space that SentencePiece adds before a text; False for other kinds of pipelines."""
    normalizer, pre_tokenizer = pipeline["normalizer"], pipeline["pre_tokenizer"]
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    llama = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": _SPACE}, replace]}
    if pre_tokenizer is None and normalizer == llama:
        pipeline["normalizer"] = replace
        return True
    if normalizer is None and pre_tokenizer is not None and pre_tokenizer["type"] == "Metaspace":
        pipeline["pre_tokenizer"] = {**pre_tokenizer, "prepend_scheme": "never"}
        return not pre_tokenizer["split"] and pre_tokenizer["replacement"] == _SPACE
    return False


def _spaces_only_lead(vocabulary: dict[str, int]) -> bool:
    """Whether ▁ occurs only at the beginning of tokens (possibly several times)."""
    return all(_SPACE not in token.lstrip(_SPACE) for token in vocabulary)
