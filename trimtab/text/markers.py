"""Special and chat-template tokens, which may close an answer."""

from __future__ import annotations

from typing import Any, Protocol


class HasChatTemplate(Protocol):
    """The attributes of a tokenizer that are used here."""

    @property
    def backend(self) -> Any:
        """The tokenizer of the `tokenizers` library."""
        ...

    @property
    def chat_template(self) -> str | None:
        """The template's source."""
        ...


def markers(tokenizer: HasChatTemplate) -> dict[int, str]:
    """Special tokens, and added tokens that occur in the chat template, by id.

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
