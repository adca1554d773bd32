"""Answers without words, calls of tools or thinking alone: what a chat template writes of them, if anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trimtab.data.examples import Example, silenced, wordless

Message = Mapping[str, Any]
Texts = Callable[[list[list[Message]]], list[str | None]]
"""Conversations to what the template writes; None for one that it does not take."""


def heard(example: Example, texts: Texts, *, keep_end: bool) -> Example:
    """The example with its wordless answers as the template writes them, silenced where it writes nothing of them.

    `keep_end` is whether messages after the last answer are kept. The same object comes back where there is nothing
    to do.
    """
    assert example.conversation is not None
    messages, silent, changed = list(example.conversation.messages), [], {}
    for i in wordless(example.conversation):
        found = _written(messages, i, texts)
        if found is None:
            silent.append(i)
        elif found is not messages[i]:
            messages[i] = changed[i] = found
    return silenced(example, silent, changed, keep_end=keep_end) if silent or changed else example


def _written(messages: Sequence[Message], i: int, texts: Texts) -> Message | None:
    """An answer with the content beside which the template writes the rest of it; None where it never does.

    Most templates write calls of tools beside an empty content, some only where it is null. One that writes null as
    a word writes the same for the word.
    """
    whole = messages[i]
    bare = {key: inner for key, inner in whole.items() if key in ("role", "name", "content")}

    def written(*answers: Message) -> list[str | None]:
        return texts([[*messages[:i], answer, *messages[i + 1 :]] for answer in answers])

    text, without = written(whole, bare)
    if text is not None and text != without:
        return whole
    null = {**whole, "content": None}
    text, *others = written(null, {**bare, "content": None}, {**whole, "content": "None"})
    return null if text is not None and text not in others else None
