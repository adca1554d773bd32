"""Ids to text one at a time, never half a character."""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.text.tokenizer import Tokenizer

_REPLACEMENT_CHARACTER = "\ufffd"
"""What a decoder shows for bytes that are no (or not yet a) UTF-8 character."""


class Detokenizer:
    """Text that is safe to show after each id; the pieces add up to `tokenizer.decode` of all ids.

    A character of several bytes may need several tokens, and some decoders treat the first token of a text
    differently (SentencePiece drops its space). So a few ids stay in view, and only the difference is given
    out, when it does not end in the middle of a character.

    Example:
        >>> stream = Detokenizer(tokenizer)                                          # doctest: +SKIP
        >>> "".join(stream.push(i) for i in tokenizer.encode("é!")) + stream.finish()  # doctest: +SKIP
        'é!'
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special: bool = True, context: Sequence[int] = ()
    ) -> None:
        """`context` are ids before the first one pushed (the end of a prompt); their text is left out."""
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._ids: list[int] = list(context)
        """Ids in view: the last ones given out, then those not yet given out."""
        self._num_emitted = len(self._ids)
        self._emitted_text = self._decode(self._ids)

    def push(self, token_id: int) -> str:
        """The text this id completes; empty while a character is unfinished."""
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
        """What is left when no id follows: an unfinished character shows as U+FFFD."""
        text = self._decode(self._ids)[len(self._emitted_text) :]
        self._ids, self._num_emitted, self._emitted_text = [], 0, ""
        return text

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=self._skip_special)
