"""Conversations given in memory: their tokens and what is trained on, exactly as rows of a training file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trimtab.data.examples import example_of
from trimtab.data.formats import Format
from trimtab.data.readers import Segment
from trimtab.data.rendering import Rendering, no_template
from trimtab.data.tokenizing import TokenizerSpec, tokenize
from trimtab.facts.errors import DataError
from trimtab.text import Tokenizer


def encode_conversations(
    tokenizer: Tokenizer, conversations: Sequence[Sequence[Mapping[str, Any]]]
) -> list[tuple[list[int], list[bool]]]:
    """(ids, which of them are of an answer) of each conversation, rendered with the tokenizer's chat template.

    Raises:
        ModelError: there is no chat template, or it fails.
        DataError: a message is malformed, or a conversation has no answer.

    Example:
        >>> hi = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
        >>> ids, answer = encode_conversations(tokenizer, [hi])[0]               # doctest: +SKIP
        >>> tokenizer.decode([i for i, on in zip(ids, answer) if on])            # doctest: +SKIP
        'Hello'
    """
    spec = TokenizerSpec.of(tokenizer)
    if spec.chat is None:
        raise no_template("the list")
    rendering = Rendering(spec.chat, "completions", tokenizer.template_variables, ("conversation",))
    segments = []
    for number, messages in enumerate(conversations, 1):
        row = {"messages": [dict(message) for message in messages]}
        example = example_of(
            f"conversation:{number}", row, Format("messages", {}), template=True, keep_end=False
        )
        segments.append(Segment(0, number, "", True, True, example=example))
    encoded = []
    for segment in tokenize(segments, spec, 1, rendering):
        if segment.unusable or segment.trained is None:
            raise DataError(
                f"conversation:{segment.row} has no answer to measure the loss of",
                'end it with {"role": "assistant", "content": "…"}',
            )
        encoded.append((segment.ids.tolist(), [bool(on) for on in segment.trained]))
    return encoded
