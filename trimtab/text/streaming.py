"""Incremental detokenization without incomplete characters."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.text.tokenizer import Tokenizer

_REPLACEMENT_CHARACTER = "\ufffd"
"""Decoders return it for bytes that are not (yet) a UTF-8 character."""


class Detokenizer:
    """Returns the final text after each id; the pieces concatenate to `tokenizer.decode` of all ids.

    A character of several bytes may need several tokens, and some decoders treat the first token of a text
    differently (SentencePiece drops its space). So the last ids are decoded together with the new one, and the new text
    is emitted once it does not end in the middle of a character.

    Example:
        >>> stream = Detokenizer(tokenizer)                                          # doctest: +SKIP
        >>> "".join(stream.push(i) for i in tokenizer.encode("é!")) + stream.finish()  # doctest: +SKIP
        'é!'
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special: bool = True, context: Sequence[int] = ()
    ) -> None:
        """`context`: ids before the first pushed one (the end of a prompt); their text is not emitted."""
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._ids: list[int] = list(context)
        """Ids that are decoded together: the last emitted ones, then those not emitted yet."""
        self._num_emitted = len(self._ids)
        self._emitted_text = self._decode(self._ids)

    def push(self, token_id: int) -> str:
        """Add an id and return the text that it completes; empty while a character is incomplete."""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if len(text) <= len(self._emitted_text) or text.endswith(_REPLACEMENT_CHARACTER):
            return ""
        piece = text[len(self._emitted_text) :]
        self._ids = self._ids[self._num_emitted :]
        self._num_emitted = len(self._ids)
        self._emitted_text = self._decode(self._ids)
        return piece

    def finish(self) -> str:
        """Return the remaining text when no id follows; an incomplete character becomes U+FFFD."""
        text = self._decode(self._ids)[len(self._emitted_text) :]
        self._ids, self._num_emitted, self._emitted_text = [], 0, ""
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=self._skip_special)
