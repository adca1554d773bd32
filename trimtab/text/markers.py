"""Tokens that no text spells by chance: those that may close an answer."""

from __future__ import annotations

from typing import Any, Protocol


class HasChatTemplate(Protocol):
    """What is asked of a tokenizer here."""

    @property
    def backend(self) -> Any:
        """The tokenizer of the `tokenizers` library."""
        ...

    @property
    def chat_template(self) -> str | None:
        """Its template's source."""
        ...


def markers(tokenizer: HasChatTemplate) -> dict[int, str]:
    """Special tokens, and others that were added to the vocabulary and stand in the chat template, by id.

    Example:
        >>> markers(tokenizer)                                      # doctest: +SKIP
        {0: '<|endoftext|>', 1: '<|im_start|>', 2: '<|im_end|>'}
    """
    template = tokenizer.chat_template or ""
    found: dict[int, str] = {}
    for token_id, token in tokenizer.backend.get_added_tokens_decoder().items():
        if token.special or (token.content.strip() and token.content in template):
            found[int(token_id)] = token.content
    return found
