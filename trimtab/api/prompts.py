"""Prompts of `Model`: validation and tokenization of texts and conversations, single or in batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trimtab.facts.errors import RecipeError
from trimtab.facts.names import described

if TYPE_CHECKING:
    from trimtab.generate import Completion
    from trimtab.text import Tokenizer

Messages = Sequence[Mapping[str, Any]]
"""A conversation: [{"role": "user", "content": "…"}, …]."""
Prompt = str | Messages


def as_batch(given: Prompt | Sequence[Prompt], name: str = "the prompt") -> tuple[list[Prompt], bool]:
    """Returns (prompts, whether it is a batch): a list of messages is one conversation, any other list is a batch.

    Raises a RecipeError with the argument's `name` for anything else.

    Example:
        >>> as_batch("a"), as_batch([{"role": "user", "content": "a"}])
        ((['a'], False), ([[{'role': 'user', 'content': 'a'}]], False))
        >>> as_batch(["a", "b"])
        (['a', 'b'], True)
    """
    if isinstance(given, str):
        return [given], False
    if isinstance(given, Mapping):
        raise RecipeError("a single message is given", 'put it into a list: [{"role": "user", "content": …}]')
    if isinstance(given, bytes) or not isinstance(given, Iterable):
        raise RecipeError(
            f"{name} is {described(given)}",
            'give a text, a conversation such as [{"role": "user", "content": "…"}], or a list of them',
        )
    items: list[Any] = list(given)
    if items and all(isinstance(item, Mapping) for item in items):
        return [_checked(items, "the conversation")], False
    batch: list[Prompt] = []
    for number, item in enumerate(items, 1):
        if isinstance(item, str):
            batch.append(item)
        elif isinstance(item, Sequence) and item and all(isinstance(message, Mapping) for message in item):
            batch.append(_checked(item, f"prompt {number}"))
        else:
            raise RecipeError(
                f"prompt {number} is neither a text nor a list of messages ({type(item).__name__})",
                'give texts, or conversations such as [{"role": "user", "content": "…"}]',
            )
    return batch, True


def check_stream(stream: object) -> None:
    """Raises a RecipeError for a stream that is not callable, such as `stream=True`."""
    if stream is not None and not callable(stream):
        raise RecipeError(
            f"stream is {described(stream)}",
            "give a function that takes each piece of text: stream=print",
        )


def _checked(messages: Messages, name: str) -> Messages:
    for number, message in enumerate(messages, 1):
        if not isinstance(message.get("role"), str):
            raise RecipeError(
                f"message {number} of {name} has no role", 'write {"role": "user", "content": "…"}'
            )
    return messages


def encode_prompts(tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Tokenizes each prompt; all conversations are rendered by the chat template in one sandbox."""
    chats = [i for i, prompt in enumerate(prompts) if not isinstance(prompt, str)]
    conversations: list[Any] = [prompts[i] for i in chats]
    rendered = tokenizer.render_chats(conversations, add_generation_prompt=True) if chats else []
    texts = dict(zip(chats, rendered, strict=True))
    return [
        tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else tokenizer.encode(texts[i])
        for i, prompt in enumerate(prompts)
    ]


def encode_scored(
    tokenizer: Tokenizer, prompts: Sequence[Prompt]
) -> list[tuple[list[int], list[bool] | None]]:
    """Tokenizes each text or conversation and returns its loss mask: the answers of a conversation, None for a text."""
    from trimtab.data.tokenizing import encode_conversations

    chats = [prompt for prompt in prompts if not isinstance(prompt, str)]
    found = iter(encode_conversations(tokenizer, chats) if chats else [])
    return [
        (tokenizer.encode_prompt(prompt), None) if isinstance(prompt, str) else next(found)
        for prompt in prompts
    ]


def texts_of(done: Completion | list[Completion]) -> str | list[str]:
    """Returns the text of a completion, or the texts of a batch."""
    return [completion.text for completion in done] if isinstance(done, list) else done.text
